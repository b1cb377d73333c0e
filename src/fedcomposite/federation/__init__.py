"""A real federation: the same methods and analyses between parties that keep their data.

=================  ================================================================================================
``site/``          who may ask what of a site
``secure/``        sums that nobody can open
``coordinator/``   jobs, checks of what sites claim, the transports that turn requests into orders
``engines/``       what carries bytes between machines: NVIDIA FLARE, Flower, or one machine's sockets
``orders``         what a coordinator asks of a site and what a site answers, as plain checked data
``wire``           tuples of tensors as messages, with strict checks on arrival
``shape``          the problem without data: what all sites must agree on
``folders``        the federation's folder; ``site_folders``: a site's; ``templates`` their texts
``systemd``        units for a party; ``logs``: a party's log that does not grow without end
``demo``           a whole federation on one machine
=================  ================================================================================================
"""
