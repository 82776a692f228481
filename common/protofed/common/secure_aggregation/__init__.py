"""Secure aggregation: a server learns the sum of what sites send, and not what one of them sent.

Bonawitz et al., CCS 2017: the malicious-server variant of double masking on the complete graph, Protocol 1 of the paper
with its signatures and its consistency round. Everything here is pure: who stores and sends what is decided elsewhere.
`protofed.client.secure_aggregation` has the table of all steps, with what each wing does in them.

    keys        each site signs public keys: one for shares, and for each vector one for masks
    shares      it splits the seeds of its masks into shares, one sealed for each site
    masked      it sends its vector plus a mask of its own and one with each other site, which cancel in the sum
    survivors   it signs the set of those whose masked vectors arrived; a set that too few have signed opens nothing
    revealed    it gives shares: of a survivor's own mask, or of the mask key of one that dropped out, never of both
    messages    what travels, as protobuf inside payloads
    score_sums  sums of the sites' own scores
"""
