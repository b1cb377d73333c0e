"""A site: who may ask it what. Policy, minimum counts, budgets, ledger, approval, audit, states and files.

One function answers whatever arrives: :meth:`fedcomposite.federation.site.site.Site.answer`.

========================  ==========================================================================================
``site``                  the party: its samples, its limits, its memory; rounds and evaluations
``analyses``              sums over its samples and counts of its table, for analyses
``table_site``            a site whose file is a table that an experiment's recipe prepares; ``table_files`` reads it
``policy``                what it agrees to, judged from an order's numbers
``gate``                  what every path out passes: what a job is bound to, which rows count, which were told of
``row_sets``              the rows that answers of all jobs tell apart, for each data set
``learned_steps``         a learned recipe held against the experiment's
``noise``                 counts and refusals that say nothing exact
``minimum_counts``        how many samples are behind, and left out of, what it tells
``ledger``                what it was asked for, written down before anything is computed
``privacy_account``       what an answer is worth, and what was spent
``budgeted_gradients``    its gradients, counted and at bounded margins
``approval``              experiments that wait for its people
``audit``                 what was asked and what left, in a signed chain
``client_states``         its memory between rounds: atomic files tagged with job and round
``enrolment``             from a folder to a site; the request by which it is admitted
========================  ==========================================================================================
"""
