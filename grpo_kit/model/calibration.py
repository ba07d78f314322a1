"""What a model reads while `quantize_dynamic` measures it, unless the user brings prompts of their own.

Sums, code, facts, letters, stories and talk, a few of each: what a layer is worth depends little on which words these
are, but much on their being words of the kinds that the model will meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_kit.model.chat import Chat, Prompt

CHATS = (
    (
        "A shop sells pens at 4 dollars each and notebooks at 7 dollars each. Lena buys 6 pens and 3 notebooks and "
        "pays with a 50 dollar note. How much change does she get?",
        "The pens cost 6 * 4 = 24 dollars. The notebooks cost 3 * 7 = 21 dollars. Together that is 24 + 21 = 45 "
        "dollars. She pays with 50 dollars, so she gets 50 - 45 = 5 dollars back. The answer is 5.",
    ),
    (
        "What is 37 + 85? Think step by step.",
        "<think>\n37 + 85: 30 + 80 = 110, and 7 + 5 = 12. 110 + 12 = 122.\n</think>\n<answer>122</answer>",
    ),
    (
        "If x + 3y = 14 and x - y = 2, what are x and y?",
        "From the second equation, x = y + 2. Substituting this into the first equation gives y + 2 + 3y = 14, so 4y "
        "= 12 and y = 3. Then x = 3 + 2 = 5. Check: 5 + 3 * 3 = 14 and 5 - 3 = 2.",
    ),
    (
        "Write a Python function that tells whether a word is a palindrome.",
        "Here is a simple solution:\n\n```python\ndef is_palindrome(word: str) -> bool:\n    letters = [c.lower() "
        "for c in word if c.isalnum()]\n    return letters == letters[::-1]\n```\n\nIt ignores case and anything "
        'that is not a letter or a digit, so `is_palindrome("Never odd or even")` returns `True`.',
    ),
    (
        "Why is the sky blue?",
        "Sunlight contains all the colors of the rainbow. As it passes through the atmosphere, the molecules of the "
        "air scatter light with a short wavelength, such as blue, much more strongly than light with a long "
        "wavelength, such as red. The blue light therefore reaches our eyes from every direction, and the whole sky "
        "appears blue.",
    ),
    (
        "Give me three tips for sleeping better.",
        "1. **Keep regular hours.** Go to bed and get up at the same time every day, even at weekends.\n2. **Avoid "
        "screens in the last hour.** Bright light tells your brain that it is still day.\n3. **Keep the room cool "
        "and dark.** Most people sleep best at around 18 degrees.",
    ),
    (
        "Summarize this in one sentence: The company announced on Thursday that it would close two of its five "
        "factories by the end of next year. It said that demand had fallen for the third year in a row and that "
        "energy had become too expensive. About 1,200 workers are affected.",
        "Because of falling demand and high energy prices, the company will close two of its five factories by the "
        "end of next year, which affects about 1,200 workers.",
    ),
    (
        "All roses are flowers. Some flowers fade quickly. Does it follow that some roses fade quickly?",
        "No. The flowers that fade quickly could all be flowers of other kinds. The two statements leave open "
        "whether any rose is among them, so the conclusion does not follow.",
    ),
    (
        "Turn this into JSON: Maria Lopez, 34 years old, lives in Madrid, speaks Spanish and English.",
        '{\n  "name": "Maria Lopez",\n  "age": 34,\n  "city": "Madrid",\n  "languages": ["Spanish", "English"]\n}',
    ),
    (
        "Hi! I feel a bit nervous about my job interview tomorrow. What should I do?",
        "It's normal to feel nervous, and it shows that you care. Try to prepare answers to the questions you are "
        "most likely to hear, and practice saying them aloud. Lay out your clothes tonight, and plan to arrive ten "
        "minutes early. Remember that they invited you because they already like what they have read. Good luck!",
    ),
)

PROSE = (
    "The Roman Empire reached its greatest extent in the year 117, when it stretched from Britain to the Persian "
    "Gulf. Its roads, some of which are still in use, allowed armies and traders to travel quickly from one end to "
    "the other. In the third century a series of civil wars, invasions and plagues weakened the state, and in 395 it "
    "was divided into a western and an eastern half.",
    "The old man closed the door behind him and stood for a moment in the snow. He had not been outside for a week. "
    "Across the valley a single light was burning in the window of the mill, and he wondered who could be awake at "
    'this hour. "Come on, then," he said to the dog, and together they started down the hill.',
    "Plants make their food from water and carbon dioxide with the energy of sunlight. This process, which is called "
    "photosynthesis, takes place in the leaves, in small bodies that contain a green pigment known as chlorophyll. "
    "Oxygen is released as a by-product. Nearly all life on Earth depends on it, directly or indirectly.",
    "PARIS - The government said on Monday that it would raise the minimum wage by 2.5 percent from the first of "
    "January. Unions called the increase too small, while business leaders warned that it could cost jobs. The "
    "finance minister is expected to present the details to parliament later this week.",
    "To change a flat tire, first park the car on level ground and pull the parking brake. Loosen the nuts by half a "
    "turn before you lift the car. Place the jack under the frame, raise the wheel off the ground, remove the nuts "
    "and take the wheel off. Put on the spare wheel, tighten the nuts by hand, lower the car, and tighten them again "
    "in a star pattern.",
    "Let G be a group and let H be a subgroup of G. We say that H is normal if gH = Hg for every element g of G. The "
    "kernel of a homomorphism is always normal: if f(h) is the identity, then f(g h g^-1) = f(g) f(g)^-1 is the "
    "identity as well.",
    "import csv\n\nclass Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n        "
    "self.balance = balance\n\n    def withdraw(self, amount):\n        if amount > self.balance:\n            raise "
    'ValueError("not enough money")\n        self.balance -= amount\n        return self.balance\n',
    "Dear Mr. Patel, I am writing about the apartment that you advertised in last week's newspaper. My husband and I "
    "are looking for a place near the university from September. We have no pets and do not smoke. Would it be "
    "possible to see the apartment on Saturday afternoon? I look forward to hearing from you.",
)


def calibration_ids(chat: Chat, prompts: Sequence[Prompt] | None) -> list[list[int]]:
    """Token ids of each prompt as the model is given it; None takes the chats and the prose of this file."""
    if prompts is not None:
        return [chat.encode(prompt) for prompt in prompts]
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in CHATS]
    return [chat.encode(turn) for turn in turns] + [list(chat.tokenizer(text).input_ids) for text in PROSE]
