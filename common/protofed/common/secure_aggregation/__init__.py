"""Secure aggregation: a server learns the sum of what sites send, and not what one of them sent.

Bonawitz et al., CCS 2017: the malicious-server variant of double masking on the complete graph, Protocol 1 of the paper
with its signatures and its consistency round. Everything here is pure: who stores and sends what is decided elsewhere.
`protofed.client.secure_aggregation` has the table of all steps, with what each wing does in them.

    keys         each site signs public keys: one for shares, and for each vector one for masks
    masking      it splits the seeds of its masks into shares, one sealed for each site. It sends its vector plus a mask
                 of its own and one with each other site, which cancel in the sum. It signs the set of those whose
                 masked vectors arrived; a set that too few have signed opens nothing. It gives shares: of a survivor's
                 own mask, or of the mask key of one that dropped out, never of both
    groups       which sites are summed together
    linear_form  what of an update is summed, as which integers, and what a method computes from the sum
    messages     what travels, as protobuf inside payloads
    score_sums   sums of the sites' own scores
"""
