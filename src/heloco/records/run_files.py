"""The files of a run's folder.

config.toml           the effective config, enough to run it again
run.json              what the tape's numbers refer to (`run_facts.RunFacts`)
tape.jsonl            a line per arrival (`tape.ArrivalRecord`)
evals.jsonl           a line per evaluation (`evaluations.EvaluationRecord`)
checkpoints/          the newest two, each whole
journal/              events of a run on real machines (`journal`)
run-id                a random id of a run on real machines
"""

CONFIG, META, TAPE, EVALS, CHECKPOINTS = "config.toml", "run.json", "tape.jsonl", "evals.jsonl", "checkpoints"
RUN_ID = "run-id"
NAMES = (CONFIG, META, TAPE, EVALS, CHECKPOINTS, RUN_ID)
