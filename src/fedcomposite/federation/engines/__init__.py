"""What carries bytes between machines: NVIDIA FLARE, Flower, or the sockets of one machine.

==========================  ========================================================================================
``engine``                  what a run asks of an engine; ``selection``: the one that a folder names
``dispatch``                a run's signed orders on their way, and what has become of them
``relayed_dispatch``        the same over relays, which connect to the run's socket; ``relaying``: a relay
``answering``               a site's own process: ``answer(bytes) -> bytes`` at a socket
``sealing``, ``signing``    orders signed by the coordinator, reports by their site; ``pki``: keys and certificates
``sockets``, ``processes``  programs of one account: frames between them; engines' programs below a party's, ``watched``
``nvflare``                 a run over FLARE; ``nvflare_parties``: its server and client; ``nvflare_kits``: their kits
``nvflare_job``             what FLARE runs: relays at the server and at a site, a gate for jobs at a site
``nvflare_job_files``       a job as files: written, signed, and checked at a site
``flower``                  a run over Flower, its SuperLink and SuperNode; ``flower_apps``: what Flower runs
``local_processes``         sites of this machine as processes, ``local`` in this one
``certificate_lifetimes``   what ends soon, and renewal
==========================  ========================================================================================

No type of an engine leaves this room. The modules that engines' own processes load (``sockets``, ``relaying``,
``nvflare_job``, ``flower_apps``, ``watched``) need neither PyTorch nor NumPy.
"""
