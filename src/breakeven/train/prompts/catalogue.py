"""Encyclopedic and chat prompts from word lists and forms of our own; and reading tasks over given passages."""

# ruff: noqa: E501 - word lists

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from breakeven.train.prompts.types import PromptRow, user

TOPICS: tuple[str, ...] = tuple(
    """photosynthesis; plate tectonics; the water cycle; black holes; vaccines; the French Revolution; the Silk Road;
the Roman aqueducts; the printing press; the periodic table; natural selection; the Great Barrier Reef; the Amazon;
the Sahara; glaciers; volcanoes; earthquakes; tides; the ozone layer; climate change; renewable energy; nuclear fusion;
batteries; semiconductors; transistors; lasers; radar; GPS; the Internet; search engines; encryption; blockchains;
machine learning; neural networks; robotics; the Turing machine; quantum mechanics; general relativity; entropy;
magnetism; electricity; sound; light; gravity; friction; buoyancy; chemical bonds; acids and bases; catalysts; enzymes;
proteins; DNA; RNA; mitosis; the immune system; antibiotics; viruses; bacteria; fungi; the human heart; the brain;
memory; sleep; dreams; the eye; hearing; taste; digestion; the liver; the kidneys; bones; muscles; vitamins; diabetes;
malaria; the Black Death; the Industrial Revolution; the Renaissance; the Enlightenment; the Cold War; the Ottoman Empire;
the Mongol Empire; the Inca; the Maya; ancient Egypt; ancient Greece; the Han dynasty; the Meiji restoration; Timbuktu;
Great Zimbabwe; the Vikings; the Crusades; the Magna Carta; feudalism; democracy; monarchy; constitutions; human rights;
the United Nations; the European Union; inflation; interest rates; central banks; stock markets; supply and demand;
unemployment; taxation; insurance; game theory; globalisation; trade unions; the gold standard; microfinance; jazz;
the violin; opera; the symphony; hip hop; folk music; ballet; theatre; Impressionism; Cubism; Baroque architecture;
Gothic cathedrals; calligraphy; photography; cinema; animation; haiku; the sonnet; the novel; mythology; fables;
Shakespeare; Cervantes; Murasaki Shikibu; Chinua Achebe; Marie Curie; Isaac Newton; Charles Darwin; Ada Lovelace;
Alan Turing; Leonardo da Vinci; Ibn Sina; Hypatia; Galileo; Nikola Tesla; Rosalind Franklin; Ramanujan; Emmy Noether;
Florence Nightingale; Nelson Mandela; Gandhi; Simon Bolivar; Cleopatra; Genghis Khan; Napoleon; Zheng He; Amelia Earhart;
Socrates; Confucius; Buddhism; Islam; Hinduism; Christianity; Judaism; Stoicism; existentialism; ethics; logic; free will;
prime numbers; the Pythagorean theorem; calculus; probability; statistics; graph theory; topology; fractals; infinity;
pi; zero; matrices; algorithms; sorting; recursion; compilers; operating systems; databases; the honeybee; ants; whales;
dolphins; elephants; octopuses; penguins; owls; bats; sharks; salmon; coral; frogs; snakes; dinosaurs; mammoths; wolves;
dogs; cats; horses; camels; rice; wheat; maize; potatoes; coffee; tea; chocolate; sugar; salt; spices; bread; cheese;
wine; fermentation; the compass; the clock; the bicycle; the steam engine; the automobile; aeroplanes; submarines; bridges;
dams; skyscrapers; canals; lighthouses; paper; glass; steel; concrete; plastics; rubber; silk; cotton; wool; the Moon;
Mars; Jupiter; Saturn; comets; asteroids; the Sun; stars; galaxies; the Big Bang; dark matter; telescopes; space stations;
the Apollo programme; satellites; rockets; chess; football; the Olympic Games; marathon running; swimming; tennis; cricket;
judo; yoga; mountaineering; Tokyo; Cairo; Istanbul; Rome; Nairobi; Mexico City; Reykjavik; Sydney; the Nile; the Danube;
the Himalayas; the Andes; Antarctica; the Pacific Ocean; the Mediterranean; monsoons; hurricanes; deserts; rainforests;
the tundra; wetlands; soil; groundwater; recycling; biodiversity; extinction; migration of birds; hibernation; camouflage;
symbiosis; food chains; pollination; seeds; trees; mosses; algae; plankton; the Latin language; Esperanto; sign languages;
alphabets; hieroglyphs; dictionaries; libraries; universities; newspapers; radio; television; advertising; propaganda;
passports; money; postage stamps; maps; calendars; time zones; the metric system; thermometers; microscopes; X-rays;
anaesthesia; surgery; blood groups; organ transplants; hygiene; nutrition; exercise; stress; happiness; friendship;
education; childhood; ageing; cities; villages; nomads; pirates; knights; samurai; castles; pyramids; temples; caravans;
the abacus; the telephone; the telegraph; the typewriter; the computer mouse; smartphones; video games; virtual reality;
3D printing; drones; electric cars; self-driving cars; solar panels; wind turbines; hydropower; geothermal energy; hydrogen;
carbon capture; desalination; irrigation; greenhouses; aquaculture; genetic engineering; cloning; stem cells; CRISPR"""
    .replace("\n", " ").split("; ")
)  # fmt: skip

ENCYCLOPEDIC_FORMS: tuple[str, ...] = (
    "What is {topic}?", "What are {topic}?", "Tell me about {topic}.", "Explain {topic} in simple terms.",
    "Write an encyclopedia article about {topic}.", "Give a short history of {topic}.",
    "Why does {topic} matter?", "What are the main facts about {topic}?", "Describe {topic} in two paragraphs.",
    "What is the connection between {topic} and {topic2}?", "Compare {topic} and {topic2}.",
    "How did {topic} change the world?", "List ten facts about {topic}.", "Summarise what is known about {topic}.",
    "Which misconceptions do people have about {topic}?", "Explain {topic} to a ten-year-old.",
    "Write the introduction of a textbook chapter on {topic}.", "Who first studied {topic}, and when?",
    "What is the origin of {topic}?", "Give a definition of {topic} and two examples.",
    "What do scientists still not know about {topic}?", "How is {topic} taught at school?",
    "Write five quiz questions about {topic}, with answers.", "What is the difference between {topic} and {topic2}?",
    "Describe the most important events in the history of {topic}.", "What are the advantages and disadvantages of {topic}?",
    "When was {topic} first mentioned?", "Where can one learn more about {topic}?", "How does {topic} work?",
    "What would the world be like without {topic}?", "Give an overview of {topic} with headings.",
    "Write a timeline of {topic}.", "Discuss {topic} from an economic point of view.",
    "What role does {topic} play in everyday life?", "Explain the key terms one needs to understand {topic}.",
    "who discovered {topic}", "how many kinds of {topic} are there", "what is the meaning of {topic}",
    "is {topic} still important today", "Name three books or works about {topic} and say what they are about.",
)  # fmt: skip

PEOPLE = (
    "Sara",
    "Ben",
    "Lucia",
    "Ahmed",
    "Yuki",
    "Nadia",
    "Leo",
    "Marta",
    "Samir",
    "Olga",
    "Priya",
    "Hugo",
    "Ayo",
    "Eva",
)
_THINGS = ("apples", "books", "marbles", "pens", "tickets", "cookies", "stickers", "eggs", "flowers", "coins", "bricks")
PLACES = ("a market", "a bakery", "school", "a library", "a farm", "a museum", "an office", "a garden", "a station")
_ROLES = (
    "a pirate captain", "a medieval knight", "a strict teacher", "a friendly robot", "a detective from the 1920s",
    "a sports commentator", "a ghost in an old castle", "a talking cat", "a grandmother who loves stories",
    "a space explorer on Mars", "a chef with little patience", "a philosopher in ancient Athens", "a tour guide in Rome",
    "a doctor in a small village", "a stage magician", "a sailor lost at sea", "an ancient tree", "a weather forecaster",
    "a job interviewer", "a librarian who knows every book", "an inventor", "a travelling musician", "a lighthouse keeper",
)  # fmt: skip
_KINDS = (
    "a poem", "a short story", "a letter", "an e-mail", "a blog post", "a product description", "a speech", "a dialogue",
    "a limerick", "a diary entry", "a news report", "a review", "an advertisement", "a song", "an essay", "a fairy tale",
    "a press release", "an invitation", "a cover letter", "a complaint", "a thank-you note", "a recipe", "a travel guide",
)  # fmt: skip
_TONES = (
    "funny",
    "sad",
    "formal",
    "friendly",
    "dramatic",
    "simple",
    "poetic",
    "short",
    "persuasive",
    "mysterious",
    "calm",
)
_SITUATIONS = (
    "I have a job interview tomorrow and I am nervous.", "My neighbour plays loud music every night.",
    "I want to learn a new language but never find the time.", "My plants keep dying.", "I cannot fall asleep.",
    "I have to give a talk to fifty people.", "My friend forgot my birthday.", "I want to eat less sugar.",
    "I am moving to another city next month.", "I spend too much time on my phone.", "I want to start running.",
    "My laptop is very slow.", "I need a present for my sister.", "I have to tell my boss that the project is late.",
    "I would like to save money for a trip.", "My child does not want to read.", "I feel bored at work.",
    "I want to cook dinner for six people.", "My cat scratches the sofa.", "I lost my passport abroad.",
    "I have two job offers.", "I want to write a book.", "We argue about the housework.", "I want to adopt a dog.",
)  # fmt: skip
_ASKS = (
    "What should I do?", "Can you give me some advice?", "Please list five ideas.", "How would you handle this?",
    "Write a message that I can send.", "What are the pros and cons of my options?", "Ask me questions to help me.",
    "Make a plan for the next week.", "Is this normal?", "Help me to see the other side.",
)  # fmt: skip
_FOLLOW_UPS = (
    "Make it shorter.", "Can you explain that in simpler words?", "Give me an example.", "Why is that?",
    "Rewrite it as a list.", "What else should I know?", "Are you sure?", "Translate your answer into Spanish.",
    "Now write it for children.", "What is the most important point?", "Thank you! Anything to add?",
)  # fmt: skip

_GERMAN_WHO = ("Der Bürgermeister", "Meine Schwester", "Die Regierung", "Ein alter Mann", "Unser Lehrer", "Die Firma",
               "Der Präsident", "Das Gericht", "Die Polizei", "Eine Studentin", "Der Verein", "Die Forscherin")  # fmt: skip
_GERMAN_DOES = ("hat gestern angekündigt", "wollte nicht erklären", "hatte lange gehofft", "wird bald entscheiden",
                "sagte am Montag", "konnte kaum glauben", "hat nie verstanden", "muss jetzt beweisen")  # fmt: skip
_GERMAN_WHAT = ("dass die neue Brücke erst im Herbst fertig wird.", "warum der Zug so spät gekommen ist.",
                "dass die Kosten höher sind als erwartet.", "ob das Museum wieder geöffnet werden soll.",
                "dass viele Menschen aus dem Dorf weggezogen sind.", "wie man das Wasser sauber halten kann.",
                "dass die Wahl ein Erfolg war.", "wann die Schule wieder beginnt.",
                "dass der Wald unter der Trockenheit leidet.", "ob die Mannschaft das Spiel gewinnen kann.")  # fmt: skip
_GERMAN_MORE = ("", " Das Wetter war dabei kein Problem.", " Am Ende waren alle zufrieden.", " Trotzdem gab es Kritik.",
                " Die Kinder freuten sich darüber.", " Niemand hatte damit gerechnet.",
                " Im nächsten Jahr soll es besser werden.", " Mehr wollte man dazu nicht sagen.")  # fmt: skip
_ENGLISH = ("The train to {place} leaves at seven.", "{who} bought three {thing} and gave one away.",
            "I would like to know where {who} lives.", "Nobody had seen such {thing} before.",
            "{who} has worked at {place} for ten years.", "If it rains, we will stay at home and read.",
            "The {thing} on the table belong to {who}.", "Could you tell me how to get to {place}?")  # fmt: skip
_TARGETS = ("French", "Spanish", "German", "Italian", "Portuguese")


def encyclopedic_prompts(count: int, seed: int) -> Iterator[PromptRow]:
    """`count` questions about topics; some may be equal."""
    draw = random.Random(seed)
    for _ in range(count):
        topic, other = draw.sample(TOPICS, 2)
        text = draw.choice(ENCYCLOPEDIC_FORMS).format(topic=topic, topic2=other)
        if draw.random() < 0.15:
            text += draw.choice((" Answer in one sentence.", " Be brief.", " Use bullet points.", " Give sources."))
        yield user("encyclopedic", "own", text)


def chat_prompts(count: int, seed: int, passages: Sequence[tuple[str, str]]) -> Iterator[PromptRow]:
    """`count` prompts over all chat abilities in turn; some may be equal. Reading tasks only where there are passages."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random], PromptRow]] = [
        _math, _math, _math, _translation, _translation, _writing, _writing, _role, _advice, _short_question, _reasoning,
        _multi_turn, _extraction,
    ]  # fmt: skip
    if passages:
        makers += [lambda d: _summary(d, passages)] * 2 + [lambda d: _retrieval(d, passages)] * 2
    for index in range(count):
        yield makers[index % len(makers)](draw)


def _math(draw: random.Random) -> PromptRow:
    who, other = draw.sample(PEOPLE, 2)
    thing, place = draw.choice(_THINGS), draw.choice(PLACES)
    a, b, c = draw.randint(3, 60), draw.randint(2, 12), draw.randint(2, 9)
    text = draw.choice(
        (
            f"{who} has {a * b} {thing} and gives {b} of them to each of {c} friends. How many {thing} are left?",
            f"At {place}, {thing} cost ${c} each. {who} buys {a} and pays with ${a * c + b}. How much change is there?",
            f"{who} reads {a} pages on Monday and {b} times as many on Tuesday. {other} reads {c} pages fewer than "
            f"{who} on both days together. How many pages does {other} read?",
            f"A tank holds {a * c} litres. It loses {c} litres every {b} minutes. After how many minutes is it empty?",
            f"{who} is {a} years old. {other} is {b} years younger. How old will they be together in {c} years?",
            f"{who} drives {a * 2} miles in {c} hours, rests, and then drives {b * 10} miles in 2 hours. What is the "
            "average speed over the time spent driving?",
            f"{who} saves ${a} a week and spends ${b} of it on {thing}. How much is saved after {c} weeks?",
            f"There are {a} rows of {b} seats. {c} rows are reserved. How many seats are free?",
            f"A shop sells {a} {thing} on the first day and {c}% more every following day. How many on the third day?",
            f"What is {a} times {b} minus {c * a}? Show your steps.",
            f"Solve for x: {b}x + {a} = {a + b * c}.",
            f"{who} and {other} share {a * 3} {thing} so that {who} gets twice as many. How many does each get?",
        )
    )
    return user("chat", "own: arithmetic", text)


def _translation(draw: random.Random) -> PromptRow:
    if draw.random() < 0.65:
        sentence = (
            f"{draw.choice(_GERMAN_WHO)} {draw.choice(_GERMAN_DOES)}, {draw.choice(_GERMAN_WHAT)}"
            f"{draw.choice(_GERMAN_MORE)}"
        )
        lead = draw.choice(("Translate German to English: {}", "Translate to English: {}", "What does this mean? {}"))
    else:
        sentence = draw.choice(_ENGLISH).format(
            place=draw.choice(PLACES), who=draw.choice(PEOPLE), thing=draw.choice(_THINGS)
        )
        lead = f"Translate English to {draw.choice(_TARGETS)}: {{}}"
    return user("chat", "own: translation", lead.format(sentence))


def _writing(draw: random.Random) -> PromptRow:
    topic = draw.choice(TOPICS)
    text = draw.choice(
        (
            f"Write {draw.choice(_KINDS)} about {topic}. It should be {draw.choice(_TONES)}.",
            f"Write {draw.choice(_KINDS)} by {draw.choice(_ROLES)} about {topic}.",
            f"Compose {draw.choice(_KINDS)} for {draw.choice(PEOPLE)} in a {draw.choice(_TONES)} tone. Mention {topic}.",
            f"Give me a {draw.choice(_TONES)} title and an outline for {draw.choice(_KINDS)} on {topic}.",
        )
    )
    return user("chat", "own: writing", text)


def _role(draw: random.Random) -> PromptRow:
    role, topic = draw.choice(_ROLES), draw.choice(TOPICS)
    if draw.random() < 0.5:
        return user("chat", "own: role play", f"What do you think about {topic}?", system=f"You are {role}.")
    text = draw.choice(
        (
            f"Pretend to be {role}. I ask you: what do you know about {topic}?",
            f"You are {role}. Introduce yourself and explain {topic} in your own way.",
            f"Act as {role} and have a conversation with me. My first question: do you like {topic}?",
        )
    )
    return user("chat", "own: role play", text)


def _advice(draw: random.Random) -> PromptRow:
    return user("chat", "own: advice", f"{draw.choice(_SITUATIONS)} {draw.choice(_ASKS)}")


def _short_question(draw: random.Random) -> PromptRow:
    topic = draw.choice(TOPICS)
    text = draw.choice(
        (
            f"when did people start to use the term {topic}", f"where does the name {topic} come from",
            f"who is most famous for work on {topic}", f"what is the largest example of {topic}",
            f"how long did it take to understand {topic}", f"what country is best known for {topic}",
            f"Question: what does {topic} have to do with {draw.choice(TOPICS)}?\nAnswer:",
            f"Is it true that {topic} was invented by accident?",
        )
    )  # fmt: skip
    return user("chat", "own: questions", text)


def _reasoning(draw: random.Random) -> PromptRow:
    a, b, c = draw.sample(PEOPLE, 3)
    thing, number = draw.choice(_THINGS), draw.randint(3, 9)
    text = draw.choice(
        (
            f"{a} is taller than {b}, and {b} is taller than {c}. Who is the shortest? Explain.",
            f"{a}, {b} and {c} stand in a line. {b} is not first. {c} is directly behind {a}. In which order do they "
            "stand?",
            f"If all {thing} in the box are red and {a} takes one out of the box, what colour is it? Why?",
            f"{a} has {number} sisters, and each sister has one brother. How many brothers are there?",
            f"Imagine that {a} overtakes the person in place {number} of a race. In which place is {a} now?",
            f"Which word does not belong with the others: {', '.join(draw.sample(_THINGS, 3))}, Tuesday? Why?",
            f"What comes next: {number}, {number * 2}, {number * 4}, {number * 8}? Explain the rule.",
        )
    )
    return user("chat", "own: reasoning", text)


def _extraction(draw: random.Random) -> PromptRow:
    lines = []
    for _ in range(draw.randint(2, 4)):
        who, place, thing = draw.choice(PEOPLE), draw.choice(PLACES), draw.choice(_THINGS)
        number = draw.randint(2, 90)
        lines.append(
            draw.choice(
                (
                    f"{who} bought {number} {thing} at {place} for ${number * 2}.",
                    f"On day {number}, {who} went to {place} and lost {draw.randint(1, 9)} {thing}.",
                    f"{who} ({number}) sells {thing} at {place}.",
                )
            )
        )
    ask = draw.choice(
        (
            "Extract all names and numbers from this text as JSON.", "Make a table of who did what.",
            "Which places are named in the text? Answer with a comma-separated list.", "List every amount of money.",
        )
    )  # fmt: skip
    return user("chat", "own: extraction", f"{ask}\n\n{' '.join(lines)}")


def _multi_turn(draw: random.Random) -> PromptRow:
    """A second question. The first answer is one neutral sentence of ours: the target only ever answers the last."""
    topic = draw.choice(TOPICS)
    first = draw.choice(ENCYCLOPEDIC_FORMS).format(topic=topic, topic2=draw.choice(TOPICS))
    answer = draw.choice(
        (
            f"There is a lot to say about {topic}. In short, it has shaped how people live and think, and it is still "
            "studied today.",
            f"The short answer is that {topic} can be understood in several ways. The most common view starts from what "
            "we can observe.",
            f"{topic[0].upper()}{topic[1:]}: many details are known, some are debated. Would you like an overview or "
            "one part of it?",
        )
    )
    messages = (("user", first), ("assistant", answer), ("user", draw.choice(_FOLLOW_UPS)))
    return PromptRow("chat", messages, "own: several turns")


def _summary(draw: random.Random, passages: Sequence[tuple[str, str]]) -> PromptRow:
    chosen = [passages[draw.randrange(len(passages))] for _ in range(draw.randint(1, 2))]
    text = " ".join(passage for _, passage in chosen)
    lead = draw.choice(
        ("Summarize: {}", "Summarise this text in one sentence: {}", "{}\n\nTL;DR:", "What is the main point of this? {}",
         "Rewrite the following in your own words: {}", "Summarize the following article.\n\n{}")
    )  # fmt: skip
    return user("chat", chosen[0][0], lead.format(text))


def _retrieval(draw: random.Random, passages: Sequence[tuple[str, str]]) -> PromptRow:
    chosen = [passages[draw.randrange(len(passages))] for _ in range(draw.randint(1, 3))]
    numbered = "\n\n".join(f"[{number}] {passage}" for number, (_, passage) in enumerate(chosen, 1))
    words = [word.strip(".,") for word in chosen[-1][1].split() if len(word) > 6]
    subject = draw.choice(words) if words else "this"
    ask = draw.choice(
        (
            f"According to the passages, what is said about {subject}?", f"What does the text say about {subject}?",
            f"Answer from the documents only: how is {subject} used?", f"Which passage mentions {subject}, and why?",
        )
    )  # fmt: skip
    lead = draw.choice(
        ("Use the following passages to answer the question.", "Here are some documents.", "Context:",
         "Answer the question based on the context below.")
    )  # fmt: skip
    return user("chat", chosen[0][0], f"{lead}\n\n{numbered}\n\nQuestion: {ask}")
