"""Sums that nobody can open: masking, shares, and the two sides of the protocol of Bonawitz et al.

====================  ==============================================================================================
``masking``           integers, keys between pairs, masks
``shamir``            Shamir's shares
``keys``              the protocol at a site: each mask is used once
``masked_answers``    a site's answers under masks
``encoding``          what is summed, and the means in it
``assembly``          the coordinator's side: it carries keys, adds, opens
====================  ==============================================================================================
"""
