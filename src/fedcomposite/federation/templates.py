"""Texts that are written into folders."""

from __future__ import annotations

EXTRAS = {"nvflare": "[federation]", "flower": "[flower]", "local": ""}
"""What is installed with the package for an engine."""

README = """\
# Enrolment of {name}

This folder lets {name} take part in a federation. `site.key` is its private key, made by `federation enrol` on the
site's own machine: keep it there, readable by one account only. `coordinator.pub` is the key with which the
coordinator at {address} signs its orders. `peers/` holds the public keys of the other sites; compare them with those
sites (`fedcomposite federation peers .`), since secure sums are as good as these keys. `site.toml` holds your data's
columns and your limits. What carries orders and reports is {engine}; its own files are beside this one.

    pip install 'fedcomposite{extra}'
    fedcomposite federation join . --data patients.csv --target num

Nothing listens on this machine's network; it connects outwards. Samples never leave. To leave the federation, stop the
command and delete this folder.
"""

SITE_TOML = """\
# {name}: edit freely; this file stays at the site.
[site]
name = "{name}"
engine = "{engine}"
address = "{address}"
# device = "cuda"              # where rounds are computed; refused where there is none

[data]
# file = "patients.csv"        # .csv, .parquet, .npz or .svm; or give --data
# database = "study.duckdb"    # in place of a file, with recipe = true: DuckDB, or a URL of SQLAlchemy
# query = "SELECT ..."         # its rows are the table; nothing is ever written there
# target = "num"               # the column to predict; or give --target
# test = "held-out.csv"        # samples on which the common model is tested
# new = "admitted.csv"         # patients whom common models score, into scored/ here; those of file if left out
# drop = ["patient_id"]
# missing = ["?"]
# separator = ";"              # only where it cannot be found from the .csv file
# decimal = ","                # the same
# encoding = "cp1252"          # if it is not UTF-8
# weight = "visits"            # the column that says what each sample counts; its sum is sent
# offset = "log_exposure"      # the column that is added to each sample's margin
# classes = [0, 1, 2]          # for a classifier, unless they are -1 and 1 or 0 and 1; these numbers are sent
# recipe = true                # a table with gaps and text: recipes of experiments prepare it, no target is needed

[data.columns]                 # common name = name in this file
# age = "alter"

[data.units]                   # common name = how this file's numbers become those of the common unit
# chol = {{ scale = 38.67 }}     # mmol/L to mg/dL; also shift = ...

[data.recode]                  # with recipe = true: common name = what this file's levels are called in common
# sex = {{ "1" = "male", "2" = "female" }}

[approval]                     # who decides what is computed here
# required = true              # experiments wait for `fedcomposite federation approve`

[limits]                       # whatever an experiment says
# max_rounds = 1000
# max_local_steps = 100
# methods = ["FedNMap", "FedAvg"]
# min_samples = 50
# min_batch = 20
# networks = true              # others than linear models: read docs/site-it.md first
# reproducible_batches = true  # the coordinator then knows which samples are in a minibatch
# reproducible_parts = true    # the same of folds, halves and bootstrap weights
# evaluations_per_day = 1000
# max_message_mb = 100.0
# secure = "required"          # only sums over several sites leave (peers/ says who they are)
"""
