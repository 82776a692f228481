"""Secure aggregation: a server learns the sum of what sites send, and not what one of them sent.

Bonawitz et al., CCS 2017: the malicious-server variant of double masking on the complete graph. It is Protocol 1 of the
paper, with its signatures and its consistency round. Everything here is pure: who stores and sends what is decided
elsewhere.

Each step is a task. A masked vector travels beside its message. The site's functions are of the client's
`secure_aggregation.session`. The server's are of its `rounds.secure_aggregation.steps`: what makes the message that a
site is sent, and what examines the site's answer.

    step                 site is sent         site's function     site sends        server's functions
    -------------------  -------------------  ------------------  ----------------  ------------------------
    fit, score-sum       the model            started, advertise  KeyAdvert         SumCheck._check_advert
    share                RosterMessage        share               SharesMessage     SumRecord.roster,
                                                                                    SumCheck._check_sites
    contributors         SharesMessage        send_flags          SignatureMessage  SumRecord._deliveries,
                                                                  and masked flags  masking.check_vector
    agree-contributors   SurvivorsMessage     agree               SignatureMessage  SumRecord.survivors,
                                                                                    masking.check_signed
    reveal-contributors  SurvivorsMessage     reveal              Revealed          SumRecord.bases,
                                                                                    SumCheck._check_sites
    mask                 ContributorsMessage  open_flags,         SignatureMessage  SumRecord._contributors,
                         (SharesMessage       send_values         and masked        manifest_problem
                         without rows)                            values
    agree                SurvivorsMessage     agree               SignatureMessage  SumRecord.survivors,
                                                                                    masking.check_signed
    reveal               SurvivorsMessage     reveal              Revealed          SumRecord.bases,
                                                                                    SumCheck._check_sites
    (aggregation)                                                                   SumRecord.total,
                                                                                    totals.next_state

Only a sum with rows (of classes, or of scores) has the steps `contributors` to `reveal-contributors`: they count who
has each row before any row is sent.

    keys         each site signs public keys: one for shares, and for each vector one for masks
    masking      it splits the seeds of its masks into shares, one sealed for each site. It sends its vector plus a mask
                 of its own and one with each other site, which cancel in the sum. It signs the set of those whose
                 masked vectors arrived; a set that too few have signed opens nothing. It gives shares: of a survivor's
                 own mask, or of the mask key of one that dropped out, never of both
    groups       which sites are aggregated together
    linear_form  what of an update is aggregated, as which integers, and what a method computes from the sum
    messages     what travels, as protobuf inside payloads
    score_sums   sums of the sites' own scores
"""
