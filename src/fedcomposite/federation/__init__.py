"""A real federation: the same methods between parties that keep their data, over Flower.

=================  ================================================================================================
``wire``           tuples of tensors as Flower records, with strict checks on arrival
``parcel``         a message as bytes
``orders``         what a coordinator asks of a site and what a site answers, as plain checked data
``shape``          the problem without data: what all sites must agree on
``states``         a site's memory between rounds: atomic files tagged with job and round
``site``           the client side: one round, evaluation
``policy``         what a site agrees to, judged from an order's numbers
``ledger``         a site's account of what it was asked for
``account``        a site's account of its privacy: what an answer is worth, what was spent
``guard``          a site's gradients, counted and at bounded margins
``enrol``          from a site's folder to a site; the request by which it is admitted
``approval``       experiments that wait for a site's people
``audit``          a site's log of what was asked and what left, in a signed chain
``masking``        secure sums: integers, keys between pairs, masks
``sharing``        secure sums: Shamir's shares
``secure``         secure sums: the protocol at a site
``tally``          secure sums: what is summed, and the means in it
``sums``           secure sums: a site's answers
``post``           sending to sites that come and go: waiting, skipping, refusing
``claims``         what a site says, held against what can be
``transport``      the driver's transport: orders to sites, reports back
``assembly``       secure sums: the coordinator carries keys, adds, opens
``secure_transport``  the driver's transport where only sums are opened
``server``         the coordinator: meets the sites, then drives the rounds
``jobs``           one experiment from its run folder to its end
``apps``           the two entry points of the bundle
``bundle``         that bundle, which holds no code, and the check of it
``pki``            certificate authority, server certificate, site keys, the key for orders
``signing``        signed requests and orders
``folder``         the federation's and the sites' folders; ``templates`` their texts
``engine``         Flower as a program: version, environment
``superlink``      Flower's SuperLink in memory: nodes, runs, its own SuperNodes (uses internals; version-checked)
``exchange``       what the service knows: sessions, orders on their way, replies that have arrived
``door``           connections from the network: counted, and short for strangers
``gate``           what the network may ask of it
``office``         what its owner may ask of it
``service``        both as one process
``monitor``        what the coordinator's machine may see of it: ``page``, health, metrics
``lifetimes``      certificates that end: warnings and renewal
``units``          units of systemd for a party
``logs``           a party's log that does not grow without end
``grid``           a run's way to its sites
``supernode``      a site's long-lived connection
``demo``           a whole federation on one machine
=================  ================================================================================================

The methods know nothing of Flower, and of Flower's internals only ``superlink`` and ``grid`` know.
"""
