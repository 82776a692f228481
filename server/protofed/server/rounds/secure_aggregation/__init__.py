"""Secure aggregation at the server: it learns what all sites' updates, or scores, add up to, and no site's own.

Each step is a task. `machine.secure_steps` decides which step is next, and of whom; `steps.SumRounds.ask` stores what
each site is sent, records the tasks and wakes the sites. An answer takes the way of every upload (`intake`), where
`SumCheck` examines it. The table of steps is in `common.secure_aggregation`.

    partners  the list of sites that is offered to all; a person at each site confirms it
    steps     the tasks, one sum as the ledger has it, and the examination of an upload to it
    totals    which runs may have secure aggregation, and the next state from an opened total
"""
