"""Secure aggregation at a site: the server learns what all sites' updates, or scores, add up to, and no site's own.

Each step is a task. `SumSteps` works on it. It reads the site's session from disk, lets `session` take what the server
sent, and stores the session. Only then it sends the answer. The table of steps is in `common.secure_aggregation`.

    partners    the site's identity, what else it takes into a sum, and its partners
    session     what the site has promised in one sum, as pure functions
    sessions    the same on disk
    steps       the tasks
"""
