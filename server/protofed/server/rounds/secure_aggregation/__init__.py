"""Secure aggregation at the server: it learns what all sites' updates, or scores, add up to, and no site's own.

Each step is a task. `machine.secure_steps` decides which step is next, and of whom; `steps.SumRounds.ask` stores what
each site is sent, records the tasks and wakes the sites. An answer takes the way of every upload (`intake`), where
`SumCheck` examines it. A masked vector travels beside its message. In each row, the site's functions are of the
client's `session`, and the server's of `steps`: what makes the message, and what examines the answer.

    step            site is sent      site's function   site sends            server's functions
    --------------  ----------------  ----------------  --------------------  --------------------------------------
    fit, score-sum  the model         begun, advertise  KeyAdvert             SumCheck._check_advert
    share           RosterMessage     share             SharesMessage         SumRecord.roster, SumCheck._check_sites
    holders         SharesMessage     send_flags        SignatureMessage and  SumRecord._deliveries,
                                                        masked flags          masking.check_vector
    agree-holders   SurvivorsMessage  agree             SignatureMessage      SumRecord.survivors,
                                                                              masking.check_signed
    reveal-holders  SurvivorsMessage  reveal            Revealed              SumRecord.bases, SumCheck._check_sites
    mask            HoldersMessage    open_flags,       SignatureMessage and  SumRecord._holders, manifest_problem
                    (SharesMessage    send_values       masked values
                    without rows)
    agree           SurvivorsMessage  agree             SignatureMessage      SumRecord.survivors,
                                                                              masking.check_signed
    reveal          SurvivorsMessage  reveal            Revealed              SumRecord.bases, SumCheck._check_sites
    (aggregation)                                                             SumRecord.total, totals.next_state

    partners  the list of sites that is offered to all; a person at each site confirms it
    steps     the tasks, one sum as the ledger has it, and the examination of an upload to it
    totals    which runs may have secure sums, and the next state from an opened total
"""
