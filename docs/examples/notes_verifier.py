"""Grades every task of the notebook: the answer has to be among the notes, and nothing be lost."""


def noted(env, final_answer=None):
    notes = env.call_tool("list_notes")
    passed, failed = [], []
    (passed if len(notes) == 2 else failed).append(f"one note was added: {notes}")
    (passed if final_answer in notes[1:] else failed).append(f"it says {final_answer!r}")
    return {"score": 0 if failed else 1, "passed": passed, "failed": failed}
