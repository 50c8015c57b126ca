"""Two training jobs, each on the stock engine and on retrograd: ``python -m retrograd.demo``.

``digits`` trains eight small networks from eight threads; ``text`` trains a transformer whose blocks are recomputed in
backward by reentrant checkpoints. Both jobs alternate between the engines in short rounds, from the same seeds, so that
the times are comparable and the losses have to agree: bit for bit with ``--backend schedule``, within rounding with
fused plans, which are compiled before the first round.
"""
