"""Secure aggregation at a site: the server learns what all sites' updates, or scores, add up to, and no site's own.

Each step is a task. `SumSteps` works on it: it reads the site's session from disk, lets `session` take what the server
sent, stores the session, and only then hands the answer in. Messages are those of `common.secure_aggregation.messages`;
a masked vector travels beside its message. In each row, the site's functions are of `session`, and the server's of
`protofed.server.rounds`: what gives the site its message, and what examines the answer.

    step            site is sent     site's function   site sends            server's functions
    --------------  ---------------  ----------------  --------------------  ---------------------------------------
    fit, score-sum  the model        begun, advertise  KeyAdvert             SumCheck._check_advert
    share           RosterMessage    share             SharesMessage         SumRecord.roster, SumCheck._check_sites
    holders         SharesMessage    send_flags        SignatureMessage and  SumRecord._deliveries,
                                                       masked flags          holders.check_vector
    agree-holders   SurvivorsMessage agree             SignatureMessage      SumRecord.survivors,
                                                                             survivors.check_signed
    reveal-holders  SurvivorsMessage reveal            Revealed              SumRecord.bases, SumCheck._check_sites
    mask            HoldersMessage   open_flags,       SignatureMessage and  SumRecord._holders, manifest_problem
                    (SharesMessage   send_values       masked values
                    without rows)
    agree           SurvivorsMessage agree             SignatureMessage      SumRecord.survivors,
                                                                             survivors.check_signed
    reveal          SurvivorsMessage reveal            Revealed              SumRecord.bases, SumRecord.total

Only a sum with rows (of classes, or of scores) has the steps `holders` to `reveal-holders`: they count who holds each
row before any row leaves.

    partners    the site's identity, what else it takes into a sum, and whom it lets itself be summed with
    session     what the site has promised in one sum, as pure functions
    sessions    the same on disk
    steps       the tasks
"""
