"""Grades every task of the notebook: the answer has to be among the notes, and nothing be lost."""


def noted(env, final_answer=None):
    notes = env.call_tool("list_notes")
    passed, failed = [], []
    (passed if len(notes) == 2 else failed).append(f"one note was added: {notes}")
    (passed if final_answer in notes[1:] else failed).append(f"it says {final_answer!r}")
    print(f">>> SUCCESS_ACCUMULATOR >>>\n{passed}\n<<< SUCCESS_ACCUMULATOR <<<")
    print(f">>> ERROR_ACCUMULATOR >>>\n{failed}\n<<< ERROR_ACCUMULATOR <<<")
    return 0 if failed else 1
