"""The demo's two dozen everyday prompts, with what each is there to show."""

from __future__ import annotations

from typing import Final, NamedTuple


class DemoPrompt(NamedTuple):
    """One built-in prompt.

    Attributes:
        kind: What sort of answer it asks for; the demo's table groups by it.
        text: The user's message.
    """

    kind: str
    text: str


DEMO_PROMPTS: Final[tuple[DemoPrompt, ...]] = (
    DemoPrompt("explanation", "Explain how a bicycle stays upright."),
    DemoPrompt("explanation", "Explain to a ten-year-old why the sky is blue."),
    DemoPrompt("explanation", "How does a vaccine work?"),
    DemoPrompt("fact", "What is the capital of France?"),
    DemoPrompt("list", "List five tips for sleeping better."),
    DemoPrompt("list", "What are the pros and cons of working from home?"),
    DemoPrompt("list", "Give me a packing list for a week of hiking."),
    DemoPrompt("enumeration", "List twenty countries with their capitals, numbered."),
    DemoPrompt("enumeration", "Write the numbers from 1 to 40, one per line."),
    DemoPrompt("steps", "How do I bake a simple loaf of bread? Give the steps."),
    DemoPrompt("poem", "Write a poem about the sea."),
    DemoPrompt("poem", "Write a poem about the rain."),
    DemoPrompt("poem", "Write a love poem with six verses."),
    DemoPrompt("story", "Tell me a fairy tale about a dragon and a princess."),
    DemoPrompt("summary", "Summarise the story of Little Red Riding Hood."),
    DemoPrompt("letter", "Write a short email asking my landlord to fix the heating."),
    DemoPrompt("code", "Write a Python function that checks whether a number is prime, with an example."),
    DemoPrompt("code", "Write a Python class for a stack with push, pop and peek, and show how to use it."),
    DemoPrompt("json", "Give me a JSON object that describes a book with title, author, year and three tags."),
    DemoPrompt("json", "Convert to JSON: Anna is 31, lives in Oslo, and likes skiing and chess."),
    DemoPrompt("arithmetic", "A train travels 120 km in 1.5 hours. What is its average speed? Show your work."),
    DemoPrompt("chinese", "请用中文解释为什么天空是蓝色的。"),
    DemoPrompt("spanish", "Escribe un poema en español sobre el mar."),
    DemoPrompt("spanish", "Explica en español cómo se hace una tortilla de patatas."),
)
"""Two dozen prompts. With SmolLM2, greedy, 512 tokens: fourteen answers end by themselves, nine go round in circles
until the limit, and one, the numbers, runs to the limit without repeating itself: it must not be taken for repetitive.
"""
