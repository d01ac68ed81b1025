"""Accuracy on grade-school math word problems, asked, extracted and scored as lm-evaluation-harness does it.

problems.py   the problems of a file        generate.py, templates.py   problems without a download
fewshot.py    worked examples in the prompt prompts.py                  the prompt's text
load.py       the load that asks them       extract.py, score.py        answers, hits, value ± standard error
questions.py  results per question          compare.py                  two runs question by question
speculation.py  what is known of speculative decoding                   section.py   all of it for a summary
harness.py    lm_eval itself, against the same server
"""
