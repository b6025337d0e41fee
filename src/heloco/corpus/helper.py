"""The helper process of `encoding`: a pickled tokenizer comes in, then lists of texts; their tokens go out."""

import os
import pickle
import signal

from .encoding import encode


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that started this one, which closes the pipe
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(0, "rb", closefd=False) as questions:
        os.dup2(2, 1)  # what a library prints must not get between the answers
        tokenizer = pickle.load(questions)
        while True:
            try:
                texts = pickle.load(questions)
            except EOFError:
                return
            try:
                answer: object = encode(tokenizer, texts)
            except Exception as error:
                answer = error
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
