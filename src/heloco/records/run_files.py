"""The files of a run's folder.

config.toml           the effective config, enough to run it again
run.json              what the tape's numbers refer to (`run_facts.RunFacts`)
tape.jsonl            a line per arrival (`tape.ArrivalRecord`)
evals.jsonl           a line per evaluation (`evaluations.EvaluationRecord`)
ended.json            how the run ended (`run_end.RunEnd`); missing while it goes on, and after a kill
checkpoints/          the newest two, each whole
journal/              events of a run on real machines (`journal`)
run-id                a random id of a run on real machines
credentials/          tokens and certificate of a served run
incoming/             uploads under way
model.partial         the model that a machine brings, while it is sent
workers/              what the workers that `heloco serve` starts keep and print
"""

CONFIG, META, TAPE, EVALS, CHECKPOINTS = "config.toml", "run.json", "tape.jsonl", "evals.jsonl", "checkpoints"
ENDED = "ended.json"
RUN_ID = "run-id"
CREDENTIALS, INCOMING, MODEL_PARTIAL = "credentials", "incoming", "model.partial"
WORKERS = "workers"
SEED_FOLDER = "seed"
"""What the names of the folders of `heloco train --seeds` begin with."""
NAMES = (CONFIG, META, TAPE, EVALS, ENDED, CHECKPOINTS, RUN_ID, CREDENTIALS, INCOMING, MODEL_PARTIAL)


def seed_folder(seed: int) -> str:
    """The name of a run's folder among others that differ from it in the seed alone."""
    return f"{SEED_FOLDER}-{seed}"
