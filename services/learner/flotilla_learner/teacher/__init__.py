"""The teacher of a run that is distilled: it scores the policy's own samples, before their step.

Start at `teacher_desk.py`. `adapters/` asks vLLM; what is made of the scores is in
`algo/distillation.py`, and they are journaled with the plan of their step."""
