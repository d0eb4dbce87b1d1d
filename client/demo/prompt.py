"""The prompt of the demo: a document, and a question that one passage of it answers."""

import dataclasses
import pathlib

from smollm2 import Tokenizer, chat_prompt

_DOCUMENT = pathlib.Path(__file__).parent / "document.txt"

# Chosen with the document so that a model this small finds the answer, and finds it clearly: the
# two best logits stay well apart at each of the first 32 tokens, so that the last bits of a float,
# in which two sound computations may differ, do not change a token.
QUESTION = "Who was the first keeper, and how long did he serve?"


def read_document() -> str:
    """The document's text."""
    return _DOCUMENT.read_text(encoding="utf-8").strip()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The prompt as text and tokens, and which tokens lie in the document and in the question."""

    text: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    document: range
    question: range

    @classmethod
    def build(cls, tokenizer: Tokenizer) -> "Prompt":
        """The document, then the question, as one user turn."""
        document = read_document()
        text = chat_prompt(f"{document}\n\n{QUESTION}")
        spans = tokenizer.spans(text)

        def tokens_within(part: str) -> range:
            begin = text.rindex(part)
            inside = [
                token
                for token, (first, last) in enumerate(spans)
                if first >= begin and last <= begin + len(part)
            ]
            return range(inside[0], inside[-1] + 1)

        return cls(
            text, tokenizer.encode(text), spans, tokens_within(document), tokens_within(QUESTION)
        )

    def passage(self, begin: int, end: int) -> str:
        """The text of tokens begin..end-1 on one line."""
        text = self.text[self.spans[begin][0] : self.spans[end - 1][1]]
        return " ".join(text.split())
