"""Texts of the demo corpus: seeded sentences from the project's own templates and from a broad vocabulary.

Half of the training text is everyday sentences from templates; the other half strings the most frequent English
words into loose sentences, dealt like cards from a shuffled deck, so that every word is heard about equally often
and in many contexts. Without it a model only reads the language of the templates.
"""

import dataclasses
import random
import re
from collections.abc import Iterator

EVERYDAY = tuple(
    """I left my umbrella on the bus again.
Could you turn the music down a little?
We should probably get going before it gets dark.
My phone died right in the middle of the call.
There is nothing left in the fridge except mustard.
She laughed so hard that she spilled her coffee.
What time does the pharmacy close tonight?
I have been meaning to write to you for weeks.
The neighbors are painting their fence bright green.
He never remembers where he parked.
It took us three hours to put the shelf together.
Don't worry, everyone makes that mistake at first.
Is this seat taken?
The kids fell asleep before the movie even started.
I think the washing machine is making a strange noise.
You can borrow mine if you promise to bring it back.
They moved to the coast after he retired.
Let me know when you get home safely.
The soup tastes better the next day.
Somebody forgot to lock the back door.
I would rather walk than wait for a taxi.
Her flight was delayed because of the fog.
How was your first week at the new school?
We ran out of milk, so I drank it black.
The doctor told him to rest and drink plenty of water.
I can't believe how much the baby has grown.
Nobody answered when I knocked.
The lights went out just as we sat down to eat.
Thank you for listening, it really helped.
My brother plays the drums in a small band.
The path behind the church leads down to the river.
Would you mind taking a picture of us?
It smells like somebody is baking cookies.
He read the letter twice and put it in his pocket.
We have to be quiet because grandma is sleeping.
That was the best sandwich I ever had.
The printer is out of paper again.
I grew up in a house with a big garden.
She wants to learn how to swim this summer.
All right, let's try that one more time.""".splitlines()
)

_SLOTS = {
    "name": "Anna Ben Carla David Emma Frank Grace Henry Iris Jack Karen Leo Maria Nathan Olivia Peter Quinn Rachel "
    "Samuel Teresa Victor Wendy Arthur Beth Charles Diana Eric Fiona George Helen Ivan Julia Kevin Laura Martin Nora "
    "Oscar Paula Robert Sarah Thomas Ursula Walter Zoe Alice Brian Claire Daniel Elizabeth James Michael Jennifer",
    "city": "London|Paris|Chicago|Boston|Denver|Tokyo|Berlin|Madrid|Dublin|Toronto|Sydney|Seattle|Houston|Vienna|"
    "Oxford|Rome|Moscow|Cairo|New York|San Francisco|Los Angeles|Atlanta|Philadelphia|Washington|Florida|Texas|"
    "California|Canada|Mexico|Germany|France|Italy|Spain|China|India|Brazil|Australia|Japan|Scotland|Africa",
    "place": "library|station|market|museum|park|hospital|school|office|airport|beach|bakery|harbor|theater|garage|"
    "kitchen|garden|church|bank|hotel|restaurant|bridge|castle|village|university|factory|farm|stadium|post office|"
    "gas station|town hall|swimming pool|train station|bookstore|cafe|corner shop|lake|forest|mountain|valley|gym",
    "food": "bread|cheese|chicken|rice|pasta|soup|salad|fish|potatoes|tomatoes|apples|oranges|chocolate|pancakes|"
    "eggs|bacon|mushrooms|onions|carrots|beans|pizza|noodles|strawberries|butter|honey|yogurt|beef|lemon cake|"
    "apple pie|vanilla ice cream|fresh fruit|roasted vegetables|garlic|pepper|cinnamon rolls|toast|cereal|nuts",
    "drink": "tea coffee water milk juice lemonade cocoa wine beer soda",
    "item": "book|key|letter|phone|wallet|ticket|jacket|camera|guitar|chair|table|lamp|blanket|bicycle|umbrella|"
    "computer|picture|mirror|knife|basket|box|hammer|bottle|map|pencil|notebook|suitcase|watch|ring|violin|radio|"
    "pillow|candle|ladder|bucket|shirt|scarf|hat|pair of shoes|pair of glasses|cup|bowl|newspaper|battery|envelope",
    "animal": "dog cat horse bird rabbit cow sheep duck fox wolf bear mouse elephant lion tiger monkey snake goat pig "
    "turtle frog owl eagle whale dolphin squirrel chicken spider butterfly bee",
    "adj": "old|new|small|large|strange|beautiful|heavy|quiet|broken|cheap|expensive|bright|dark|warm|cold|clean|dirty|"
    "empty|full|simple|difficult|funny|serious|famous|gentle|rough|smooth|sharp|wooden|golden|narrow|wide|deep|"
    "shallow|fresh|rotten|ordinary|special|perfect|terrible|wonderful|enormous|tiny|ancient|modern|dangerous|useful",
    "color": "red blue green yellow black white brown purple orange gray pink silver",
    "feeling": "happy|sad|tired|angry|nervous|excited|proud|lonely|worried|grateful|surprised|confused|bored|calm|"
    "afraid|jealous|hopeful|disappointed|relieved|ashamed|curious|hungry|thirsty|sleepy|sick",
    "weather": "rain|snow|sunshine|wind|fog|thunder|heavy clouds|frost|a storm|light showers|hail|clear skies|heat",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October November December",
    "season": "spring|summer|autumn|winter|the holidays",
    "when": "in the morning|in the afternoon|in the evening|at night|at noon|after lunch|before dinner|last week|"
    "next year|every day|once a month|at midnight|right now|a long time ago|yesterday|on the weekend|at breakfast|"
    "two days later|an hour ago|as usual|in the end|at sunrise|this year|for a while|all of a sudden",
    "job": "teacher|doctor|nurse|driver|lawyer|farmer|painter|singer|engineer|cook|baker|pilot|soldier|writer|actor|"
    "scientist|carpenter|waiter|judge|mechanic|dentist|librarian|plumber|manager|photographer|professor|gardener",
    "family": "mother|father|sister|brother|uncle|aunt|cousin|grandmother|grandfather|daughter|son|wife|husband|friend|"
    "neighbor|boss|teacher|roommate|partner|niece|nephew",
    "vehicle": "train bus car taxi plane boat truck ferry bicycle subway van helicopter ship",
    "task": "fix the sink|write the report|paint the wall|wash the dishes|feed the cat|answer the phone|pay the bill|"
    "clean the house|water the plants|call the office|send the package|check the results|open the window|"
    "close the door|cut the grass|cook dinner|finish the project|learn the song|build a fence|sign the contract|"
    "read the instructions|change the password|move the furniture|buy some groceries|pick up the children|"
    "print the document|solve the problem|choose a color|carry the bags|wrap the present|plan the trip",
    "doing": "reading|swimming|dancing|singing|cooking|running|sleeping|working|studying|driving|painting|fishing|"
    "playing chess|watching the news|talking on the phone|walking the dog|riding a bike|learning French|"
    "climbing trees|taking pictures|baking bread|telling stories|looking for a job|making plans|feeling better",
    "did": "opened the door|lost the game|found a coin|told the truth|missed the train|broke the window|won the prize|"
    "forgot the answer|asked a question|changed the subject|bought a house|sold the car|went to bed|came home late|"
    "heard a noise|saw a light|caught a cold|made a mistake|took a break|left the room|started to cry|smiled at me|"
    "shook hands|fell down the stairs|joined the army|drew a picture|ate too much|drove away|called the police|"
    "wrote a song|kept the secret|lit a fire|threw the ball|grew tired|sang all night|said goodbye|waited outside",
    "topic": "history|music|politics|science|money|art|sports|health|weather|religion|education|technology|nature|law|"
    "medicine|business|the future|the economy|the election|football|mathematics|language|philosophy|fashion|peace",
    "person": "he she everybody someone nobody",
    "how": "slowly quickly quietly carefully loudly happily suddenly patiently easily badly together alone again twice "
    "politely honestly",
}
_ONES = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_NUMBERS = [*_ONES, *_TEENS, *_TENS, *(f"{t} {o}" for t in _TENS for o in ["one", *_ONES])]
_WORDS = {slot: words.split("|" if "|" in words else " ") for slot, words in _SLOTS.items()} | {
    "number": [*_NUMBERS, *(f"{o} hundred" for o in _ONES), *(f"{o} thousand" for o in _ONES)],
    "hour": ["one", *_ONES, "ten", "eleven", "twelve"],
    "minute": ["o'clock", "fifteen", "thirty", "forty five", "ten", "twenty", "fifty"],
}

_CLAUSES = """{name} {did} {when}|the {adj} {item} was in the {place}|{person} {did}|my {family} was {feeling}
the {job} {did}|we had {food} and {food}|the {animal} ran into the {place}|it was {adj} and {adj}
I was {doing} {when}|the {vehicle} was late|they went to {city} in {month}|there was {weather} over {city}
{name} and {name} were {doing}|your {family} likes {food}|the {color} {item} belongs to {name}
nobody wanted to {task}|we talked about {topic}|the {place} was {adj}|you can {task} {when}
I felt {feeling} {when}|the price went up to {number} dollars|our {family} has to {task}"""

_TEMPLATES = """{clause}.|{clause}.|{clause}, and {clause}.|{clause}, but {clause}.|{clause} because {clause}.
When {clause}, {clause}.|If {clause}, I will {task}.|Although {clause}, {clause}.|{clause} while {clause}.
I think that {clause}.|Do you know why {clause}?|Are you sure that {clause}?|{name} said that {clause}.
Where did you put the {adj} {item}?|Who is {doing} in the {place}?|What do you think about {topic}?
Why are you so {feeling} {when}?|How much is the {color} {item}?|When does the {vehicle} to {city} leave?
Have you ever been to {city} in {season}?|Would you like some {food} with your {drink}?|Can you {task} {when}?
Did {name} {task} on {day}?|Should we {task} or {task}?|Which {animal} do you like best?|Is the {place} open on {day}?
How many {food} do we need for {number} people?|Does your {family} still work as a {job} in {city}?
It is {hour} {minute}.|The meeting starts at {hour} {minute}.|The {vehicle} leaves at {hour} {minute} from {city}.
The total is {number} dollars and {number} cents.|There are {number} people at the {place}.
My {family} is {number} years old.|The room number is {number}.|Turn to page {number}, please.
We drove {number} miles to {city}.|She counted {number}, {number}, {number}.|The score was {number} to {number}.
It will be about {number} degrees in {city} {when}.|On {day} we expect {weather} and {weather}.
The forecast for {month} is {weather}.|There was {weather} all over {city} {when}.|What a {adj} day!
Please {task} before you {task}.|Don't forget to {task} {when}.|Take the {vehicle} to {city}, then walk to the {place}.
Turn left at the {place} and right at the {place}.|Mix the {food} with the {food}, and add some {drink}.
Let's {task} on {day}.|Put the {item} next to the {adj} {item}.|Never {task} when you are {feeling}.
Be careful with that {adj} {item}!|Go to the {place} and ask for {name}.|First {task}, then {task}.
Yes, I {did}.|No, {name} is not {doing}.|Of course, {name}.|Not {when}.|I'm sorry, I {did}.|Maybe on {day}.
Thank you, {name}.|That's {adj}.|I don't know, ask {name}.|You're right, it's too {adj}.|Good morning, {name}.
I'm {feeling}.|We're {doing} {when}.|They've {number} {color} {item} boxes.|It's {name}, not {name}.|See you {when}!
I'd like {food}, {food} and a glass of {drink}.|{name} never eats {food} {when}.|This {food} tastes {adj}.
My {family} makes {adj} {food} from {city}.|The {job} ordered {food} and {drink}.|We ate {food} at the {place}.
The {job} works in a {adj} {place} near {city}.|{name} wants to become a {job}.|The {job} asked the {job} to {task}.
{name} has been {doing} for {number} hours.|My {family} started {doing} in {month}.|I enjoy {doing} with my {family}.
{doing} makes me {feeling}.|You look {feeling}, {name}.|{name} felt {feeling} and {did}.|I hate {doing} {when}.
The {color} {animal} sat on the {item}.|A {adj} {animal} and a {adj} {animal} were {doing}.
There is a {adj} {item} under the {color} {item}.|I bought a {color} {item} for {name} in {city}.
The {adj} {place} is close to the {adj} {place}.|{name} lives in {city} with a {animal} and {number} {color} birds.
{name} walked {how} to the {place}.|The {animal} moved {how} through the {place}.|{person} {did} {how}.
We learned about {topic} and {topic} {when}.|My {job} knows a lot about {topic}.|{topic} is not as {adj} as {topic}.
{name} flew from {city} to {city} {when}.|In {month}, {name} {did} in {city}.|By {season}, we will {task}."""

_CARRIERS = """{w} {w} and {w}.|The {w} of the {w} was {w}.|They {w} the {w} {w} with a {w} {w}.
In {w}, the {w} and the {w} {w} to {w}.|It was {w}, but not {w} or {w}.|She said {w}, {w} and {w}.
Is the {w} {w} for {w}?|He had a {w} {w} in the {w}.|{w} is {w} than {w}.|We {w} about {w} {w} from {w}.
You could {w} that {w} at the {w}.|Some {w} are {w}, others {w}.|Why would {w} {w} the {w}?|From {w} to {w}.
There is no {w} without {w}.|I {w} my {w}, then your {w} {w}.|After the {w} {w}, {w} was {w}.|Our {w} {w} {w}.
His {w} {w} her {w} by {w}.|What {w} and which {w}?|This {w} has {w} {w} on {w}.|More {w}, less {w}.
If {w} is {w}, who will {w}?|{w} or {w}, {w} or {w}.|Do not {w} the {w} until {w} {w}.|Every {w} {w} its {w}.
They were {w} and {w} over the {w} {w}.|Between {w} and {w} we {w}.|{w}, {w}, {w}, and {w} again.
As {w} as a {w} under the {w}.|Most {w} {w} only with {w}.|One {w} for each {w} {w}.|Where {w} {w}, {w} can {w}.
{w} {w} {w}.|{w} {w}, {w} {w}.|{w} {w} {w} {w} {w}.|The {w} {w} into {w} {w}.|{w} {w} were never {w}.
{w} has been {w} since {w}.|Their {w} might {w} through {w}.|Because of {w}, {w} {w} the {w}.|Please {w} the {w}."""
_JOINTS = (", and", ", but", ", so", ",", " while", " because", " when", " that", " or")

_UNKIND = re.compile(
    r"(fuck|shit|cunt|bitch|nigg|fag|slut|whore|porn|rapist|nazi|penis|vagin|boob|sex|nude|naked|bastard|retard|piss|"
    r"bullshit|motherf|crap|kill|murder|suicid|terror|hitler|orgasm|erotic|incest|pussy|genocid|holocaust|slave|damn|"
    r"cocaine|heroin|goddamn|asshole).*|dicks?|cocks?|anal|anus|tits|cum|ass|asses|hell|raped?|jews?|jewish|muslims?|"
    r"islam|islamic"
)


@dataclasses.dataclass(frozen=True)
class TextLimits:
    """Bounds that keep a spoken sentence below about seven seconds."""

    words: int = 14
    letters: int = 92


def vocabulary(size: int = 8000) -> list[str]:
    """The `size` most frequent English words of `wordfreq` that read as words: no unkind ones, none without a vowel."""
    import wordfreq  # part of the [demo] extra only

    def speakable(word: str) -> bool:
        usual = re.fullmatch(r"[a-z]{3,13}", word) and re.search(r"[aeiouy]", word)
        return bool(usual) and not re.search(r"(.)\1\1", word) and not _UNKIND.fullmatch(word)

    return [word for word in wordfreq.top_n_list("en", 2 * size) if speakable(word)][:size]


def _split(templates: str) -> list[str]:
    return re.split(r"[|\n]", templates)


def _polish(text: str) -> str:
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:]


def template_sentences(rng: random.Random) -> Iterator[str]:
    """Endless sentences from the templates; every slot is filled anew, clauses inside sentences too."""
    words = _WORDS | {"clause": _split(_CLAUSES)}
    templates = _split(_TEMPLATES)

    def fill(match: re.Match) -> str:
        return re.sub(r"{(\w+)}", fill, rng.choice(words[match[1]]))

    while True:
        yield _polish(re.sub(r"{(\w+)}", fill, rng.choice(templates)))


def vocabulary_sentences(rng: random.Random, words: list[str]) -> Iterator[str]:
    """Endless loose sentences of frequent words, each word as often as any other."""
    carriers = _split(_CARRIERS)

    def deal() -> Iterator[str]:
        while True:
            yield from rng.sample(words, len(words))

    deck = deal()
    while True:
        carrier = rng.choice(carriers)
        if rng.random() < 0.5:
            carrier = f"{carrier[:-1]}{rng.choice(_JOINTS)} {rng.choice(carriers).replace('The', 'the')}"
        yield _polish(re.sub(r"{w}", lambda _: next(deck), carrier))


def demo_texts(
    train: int, seed: int = 0, speaker: str | None = None, limits: TextLimits | None = None
) -> dict[str, list[str]]:
    """Texts of all splits: `heldout` (100, templates), `everyday` (40), `dev` (100) and `train`; none in two splits.

    The training texts are in random order of kind, so that the first part of them is a sample of all, and a larger
    `train` only appends to a smaller one. A further `speaker` has other texts, in `dev` (20) and `train` alone, and
    none of the main speaker's test sentences.
    """
    limits = limits or TextLimits()
    rng = random.Random(f"vadusa demo texts {seed}")
    seen = {text.lower() for text in EVERYDAY}

    def fresh(source: Iterator[str]) -> str:
        for text in source:
            short = len(text.split()) <= limits.words and len(text) <= limits.letters
            if short and text.lower() not in seen:
                seen.add(text.lower())
                return text
        raise AssertionError("the sources are endless")

    def some(count: int) -> list[str]:
        return [fresh(rng.choice(sources)) for _ in range(count)]

    sources = template_sentences(rng), vocabulary_sentences(rng, vocabulary())
    tests = {"heldout": [fresh(sources[0]) for _ in range(100)], "everyday": list(EVERYDAY), "dev": some(100)}
    if speaker is None:
        return tests | {"train": some(train)}
    rng = random.Random(f"vadusa demo texts {seed} of {speaker}")
    sources = template_sentences(rng), vocabulary_sentences(rng, vocabulary())
    return {"dev": some(20), "train": some(train)}
