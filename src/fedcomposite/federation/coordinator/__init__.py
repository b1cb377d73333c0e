"""The coordinator: jobs, checks of what sites claim, the transports that turn requests into orders.

======================  ============================================================================================
``coordinator``         meets the sites, then has the driver run a method's rounds
``inquiry``             the sites as those who answer an analysis
``transport``           orders to sites, reports back; ``secure_transport`` where only sums are opened
``delivery``            sending to sites that come and go: waiting, skipping, refusing
``claims``              what a site says, held against what can be
``plans``               what a command will ask at most, said before the first exchange
``jobs``                one experiment from its run folder to its end
======================  ============================================================================================
"""
