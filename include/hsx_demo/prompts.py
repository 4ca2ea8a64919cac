"""What the demo's data set asks: ordinary chat turns, from one line to a page of pasted text.

``(question, pasted text, most tokens of the answer)``; the pasted text is empty for most. All of it was
written for this project.
"""

from __future__ import annotations

MINUTES = """Minutes of the harbour committee, 14 March. Present: the harbour master, two members of the fishing
cooperative, the ferry company, a resident of Quay Street, and the town engineer. The minutes of February were
read and accepted with one correction: the new bollards are cast iron, not steel. 1. Dredging. The engineer
reported that the channel has silted up by forty centimetres since the last survey. The ferry can enter at
every tide but the lowest spring tides. Two offers for dredging were received, one for April and one for
September. The September offer is cheaper by a fifth, but the cooperative pointed out that the herring season
begins in August and that boats would lie idle. After a discussion the committee chose April, on condition
that the work stops at night, because the residents of Quay Street had complained about noise during the last
dredging. 2. The ice house. Its compressor failed twice in February. The cooperative asked for a new one
before summer. The harbour master has asked three firms; only one can deliver before June. The committee
approved the purchase and asked for a maintenance contract, so that a fault is looked at within two days. 3.
Berths for visitors. Last summer the pontoon was full on thirty-one nights. The ferry company offered to give
up its second berth from July to September. The committee thanked the company. The fee for visiting boats
stays as it is. 4. Any other business. A resident asked for a bench at the end of the pier. The engineer will
see what the wind allows. The next meeting is on 11 April at seven in the evening, in the old customs house."""

EXPEDITION = """From the notebook of a botanist, third week in the valley. Monday. Rain since before dawn, so
we stayed under the canvas and
pressed what we gathered on Saturday. Of the eleven sheets nine have dried well; two have gone
brown at the edges because the blotting paper was damp. I have hung the paper over the stove. Ines drew the
small gentian from the scree, which neither of us knows. Its leaves stand in whorls of four and the throat of
the flower is fringed, as in no gentian of the lower meadows. Tuesday. Clear and cold. We went up the eastern
stream as far as the second waterfall. Above it the alders end and a heath begins which the shepherds burn
every third year. On ground burnt last spring we counted fourteen kinds of plant in one square metre, on
ground not burnt for three years only six, most of it heather. I should like to come back next year and count
again on the same squares, and have marked the corners with white stones. Wednesday. The mule has a stone in
its hoof and the guide will not move. We used the day to measure the stream: it is four paces wide at the
camp, carries milk-coloured water until noon and clear water after dark, which means that the glacier above
melts by day only. The temperature of the water was three degrees in the morning and six in the afternoon.
Thursday. Over the pass at last. On the north side the snow lies until July and the plants are a month behind:
what had fruit on our side stands in bud over here. We found the fringed gentian again, eleven plants of it,
all on limestone and none on the slate beside it, although the two rocks meet in a line that one can step
across. Ines believes that it is the rock that decides and not the height. I believe that she is right, and we
shall look for limestone from now on. Friday. Down to the village to send the parcels. The schoolmaster showed
us a dried plant that his father had found sixty years ago above the mill. It is the same gentian, and the
mill stands on limestone."""

RECIPE_LETTER = """Dear Tomas, you asked how your grandmother made the bread that she took to the fair. She never wrote
it down, so I tell you what I saw. In the evening she mixed two handfuls of rye flour with warm water and a spoon of
the sour dough that she kept in a jar on the window. She covered it with a cloth and put it near the stove,
never on it. In the morning it smelled of apples and had holes like a sponge. She added wheat flour, salt and
caraway, until the dough came off her hands, and kneaded it for as long as it takes to sing the long hymn
twice. Then it rested until it had doubled. She shaped it without pressing the air out, cut a cross in the top
and baked it in a very hot oven at first; after a quarter of an hour she opened the door for a moment and let
the heat go down. It was done when it sounded hollow from below. She did not let us cut it before the next
day, and that was the hardest part. Your aunt Marta."""

REPORT = """Incident report: the booking site was slow between 09:10 and 10:25 on Tuesday. 09:10 The first customers
report that the calendar loads for more than ten seconds. 09:14 An alert fires: the response time of the
search service is above two seconds. 09:20 The person on call sees that the database server is at full load,
and that one query, which lists free rooms for a month, is called forty times as often as on other days. 09:35
The callers are found: a partner's new price comparison asks for every hotel and every month, once a minute.
09:41 The partner is called; nobody answers. 09:50 A limit of five requests a second is set for the partner's
key. The load goes down by half. 10:05 An index on the table of bookings is rebuilt; it had grown to four
times its size, because old bookings were deleted without cleaning up. 10:25 The response time is back at 150
milliseconds. The partner wrote in the afternoon that the comparison will ask once an hour. What went well:
the alert came four minutes after the first report. What went badly: nobody had set a limit for partners, and
the index had not been looked at for a year."""

QUESTIONS: list[tuple[str, str, int]] = [
    ("What is the capital of France?", "", 24),
    ("Name three primary colours.", "", 24),
    ("How many minutes are there in two hours?", "", 32),
    ("Write a haiku about the sea.", "", 40),
    ("Why is the sky blue? Answer in two sentences.", "", 64),
    ("Translate 'good morning, my friend' into Spanish.", "", 24),
    ("What does a compiler do?", "", 64),
    ("Give me a short definition of photosynthesis.", "", 64),
    ("List five vegetables that grow under the ground.", "", 48),
    ("What is the difference between weather and climate?", "", 64),
    ("Explain to a child why the moon changes its shape.", "", 64),
    ("Which is heavier, a kilogram of iron or a kilogram of feathers? Say why.", "", 64),
    ("Write a polite message to a neighbour whose dog barks at night.", "", 64),
    ("What are the three states of matter? Give an example of each.", "", 64),
    ("Suggest a title for a story about a lighthouse keeper who is afraid of the dark.", "", 32),
    ("How do I boil an egg so that the yolk stays soft?", "", 64),
    ("What is a prime number? Is 21 one?", "", 64),
    ("Tell me a fact about octopuses.", "", 48),
    ("Write a Python function that returns the larger of two numbers.", "", 64),
    ("What should I pack for a day of hiking in autumn?", "", 64),
    ("Who wrote Romeo and Juliet, and what is it about in one sentence?", "", 64),
    ("Explain the word 'irony' with an example.", "", 64),
    ("I have three apples and give one away, then I buy two more. How many do I have?", "", 64),
    ("Describe a thunderstorm without using the words rain, thunder or lightning.", "", 64),
    ("What is the purpose of a library in a town?", "", 64),
    ("Give two arguments for and two against school uniforms.", "", 64),
    ("Write a short dialogue between a baker and a customer who wants bread from yesterday.", "", 64),
    ("How does a bicycle stay upright when it moves?", "", 64),
    ("Summarise these minutes in three sentences.", MINUTES, 64),
    ("When is the next meeting, and what was decided about the ice house?", MINUTES, 64),
    ("What does the botanist learn about the gentian?", EXPEDITION, 64),
    ("Write down, as a short list, what the writer did on each day.", EXPEDITION, 64),
    ("Turn this letter into a recipe with numbered steps.", RECIPE_LETTER, 64),
    ("Why did Marta write this letter?", RECIPE_LETTER, 48),
    ("What was the cause of this incident, and what should be done so that it does not happen again?", REPORT, 64),
    ("Write one sentence for customers about what happened on Tuesday.", REPORT, 48),
    ("What time did the response time go back to normal?", REPORT, 32),
    ("Which item of the minutes would interest a fisherman most, and why?", MINUTES, 64),
    ("What is the fringed gentian's favourite rock?", EXPEDITION, 40),
    ("What made the bread smell of apples?", RECIPE_LETTER, 40),
]
