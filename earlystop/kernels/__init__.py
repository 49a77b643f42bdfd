"""The arithmetic on rows of logits and hidden states, one file per back end, one signature for all of them.

========================  ==============================  =======================  ==========================
what                      entry (picks a back end)        CPU                      GPU
========================  ==============================  =======================  ==========================
top-1, entropy, margins   ``stats.logit_stats``           ``cpu``                  ``triton_stats``
forced and masked rows    ``mask.write_rows``             ``cpu_mask``             ``triton_mask``
unit means and cosines    ``similarity.unit_similarity``  ``cpu_similarity``       ``triton_similarity``
========================  ==============================  =======================  ==========================

``reference`` holds the float64 loops that say what each of them means. Importing this package, or an entry module,
imports neither triton nor numba: a back end is loaded on its first call.
"""
