"""What carries messages between machines: the service of the coordinator, the sites' connections, keys, signatures.

==========================  ========================================================================================
``engine``                  what a run asks of an engine; ``local``: sites on this machine, without a network
``service``                 the coordinator's process: one port for sites (TLS), one socket for its owner
``mailbox``                 sessions, orders on their way, replies that have arrived
``site_api``                what the network may ask; ``connection_limit``: connections are few and short for strangers
``admin_socket``            what the owner's account may ask
``connection``              a site's long-lived connection
``grid``                    a run's way to its sites
``pki``, ``signing``        certificates and keys; signed requests and orders; ``certificate_lifetimes`` renews them
``superlink``, ``flower``   Flower's SuperLink in memory (uses internals; version-checked), Flower as a program
``apps``, ``bundle``        the entry points that Flower's own SuperNode starts, and the bundle, which holds no code
==========================  ========================================================================================
"""
