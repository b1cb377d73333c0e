"""A real federation: the same methods between parties that keep their data, over Flower.

=================  ================================================================================================
``wire``           tuples of tensors as Flower records, with strict checks on arrival
``orders``         what a coordinator asks of a site and what a site answers, as plain checked data
``shape``          the problem without data: what all sites must agree on
``tables``         a site's own data
``store``          a site's memory between rounds: atomic files tagged with job and round
``site``           the client side: limits, one round, evaluation
``server``         the coordinator's loop: cohorts, waiting or skipping, checkpoints, history
``apps``           the two entry points of the bundle, which holds no code
``bundle``         that bundle, and the check that it holds no code
``pki``            certificate authority, server certificate, site keys
``folder``         the federation's and the sites' folders
``supernode``      the site's long-lived connection (touches Flower's internals; version-checked)
``superlink``      the coordinator's service, its administration closed to the network (the same)
``commands``       the command line
=================  ================================================================================================

Only ``wire``, ``server``, ``apps``, ``supernode`` and ``superlink`` import Flower; the methods never do.
"""
