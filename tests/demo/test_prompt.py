"""The demo's document and question."""

from prompt import QUESTION, read_document
from smollm2 import chat_prompt


def test_document_is_about_1500_tokens(model):
    assert 1_400 <= len(model.tokenizer.encode(read_document())) <= 1_600


def test_prompt_knows_where_document_and_question_are(prompt):
    def text(tokens):
        return prompt.text[prompt.spans[tokens[0]][0] : prompt.spans[tokens[-1]][1]]

    assert prompt.text == chat_prompt(f"{read_document()}\n\n{QUESTION}")
    assert len(prompt.spans) == len(prompt.tokens)
    assert text(prompt.document) == read_document()
    assert text(prompt.question) == QUESTION


def test_passage_is_one_line(prompt):
    begin = prompt.document.start
    assert prompt.passage(begin, begin + 14).startswith("The Lock-Keeper's Book of Alder Reach T")
