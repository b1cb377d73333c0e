"""Texts that are written into folders."""

from __future__ import annotations

README = """\
# Enrolment of {name}

This folder lets {name} take part in a federation. `site.key` is its private key, made by `federation enrol` on the
site's own machine: keep it there, readable by one account only. `ca.crt` is the authority that vouches for the
coordinator at {address}, and `coordinator.pub` is the key with which it signs its orders. `peers/` holds the public
keys of the other sites; compare them with those sites (`fedcomposite federation peers .`), since secure sums are as
good as these keys. `site.toml` holds your data's columns and your limits.

    pip install 'fedcomposite[flower]'
    fedcomposite federation join . --data patients.csv --target num

Nothing listens on this machine; it connects to {address} over TLS. Samples never leave. To leave the federation, stop
the command and delete this folder.
"""
