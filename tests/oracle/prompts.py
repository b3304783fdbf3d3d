"""Real text for the oracle tests, and prompts cut from it at fixed pseudo-random places.

Random token ids make poor prompts: the model is unsure everywhere and near-ties abound. This is original prose on
many subjects, with code, numbers and other languages in between so that rare tokens occur. It knows no tokenizer:
the caller encodes `texts()` and hands the ids to `cut`.
"""

import random

LENGTHS_32 = [
    *(1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64),
    *(65, 80, 100, 127, 128, 129, 150, 177, 215, 255, 256, 257, 333, 400, 511, 1200),
]

NUM_ORDERS = 4


def texts() -> str:
    """Some ten thousand words: every paragraph `NUM_ORDERS` times, each time among other neighbours."""
    rng = random.Random(0)
    paragraphs = PARAGRAPHS.strip().split("\n---\n")
    ordered = []
    for _ in range(NUM_ORDERS):
        rng.shuffle(paragraphs)
        ordered += paragraphs
    return "\n\n".join(ordered)


def cut(token_ids: list[int], lengths: list[int], seed: int) -> list[list[int]]:
    """One prompt of each length, from places in `token_ids` that depend on the seed alone."""
    if max(lengths) > len(token_ids):
        raise ValueError(f"cannot cut {max(lengths)} tokens from a text of {len(token_ids)}")
    rng = random.Random(seed)
    starts = [rng.randrange(len(token_ids) - length + 1) for length in lengths]
    return [token_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


# Parted by lines of three hyphens; a blank line belongs to its paragraph.
PARAGRAPHS = '''
The river leaves the mountains in a hurry and reaches the plain with nothing left to prove. Above the last gorge it is
the colour of milk, because the glacier that feeds it grinds rock as fine as flour; forty kilometres below, after two
lakes have let the dust settle, it is as green as bottle glass. The people who live along it have a different name for
each of these rivers, and an old ferryman once told me that he had worked on three of them without ever moving house.
In spring the water rises by a metre in a single night. In August children walk across it with their shoes in their
hands, and the herons, which are patient birds, stand in the middle and wait for them to go home.
---
A good loaf of bread needs flour, water, salt, and more time than most people are willing to give it. Mix 500 grams of
flour with 350 grams of water and leave it alone for half an hour before you add anything else. The gluten will begin
to form without any help from you. Then add 10 grams of salt and 100 grams of a lively starter, fold the dough over
itself every thirty minutes for three hours, and put it in the refrigerator overnight. The next morning, heat the oven
to 240 degrees with an iron pot inside it. Bake the loaf with the lid on for 25 minutes, then with the lid off until
the crust is darker than you think it should be. Wait an hour before you cut it. Nobody ever does.
---
The invention of the printing press did not, by itself, make anybody literate. For the first fifty years most of what
came off the presses was what the scribes had been copying already: psalters, grammars, calendars, indulgences. What
changed was the price of a mistake. A scribe who misread a word spoiled one book, while a compositor who misread a
word spoiled a thousand, and so there came into the world a new kind of person, the corrector, who was paid to read
slowly. It is to these correctors, more than to the printers, that we owe the full stop, the page number, and the
habit of believing that two copies of the same book say the same thing.
---
def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result

def merge_sort(items):
    if len(items) <= 1:
        return list(items)
    middle = len(items) // 2
    return merge_sorted(merge_sort(items[:middle]), merge_sort(items[middle:]))

print(merge_sort([38, 27, 43, 3, 9, 82, 10]))  # [3, 9, 10, 27, 38, 43, 82]
---
When light passes from air into water it slows down, and because it slows down it bends. The amount by which it bends
depends on its colour, which is why a prism can spread white light into a band that runs from red to violet. A drop of
rain is a poor prism but there are a great many of them. Each drop sends back to your eye only one colour, the one
that happens to leave it at the right angle, about 42 degrees for red and 40 degrees for violet, and the bow that you
see is made of millions of drops, each contributing a single spark and then falling out of the picture. Two people who
stand side by side are looking at different drops. Strictly speaking, nobody has ever seen the same rainbow as anyone
else.
---
Dear Ms. Okafor, thank you for your letter of 14 March regarding invoice no. 20871. We have looked into the matter and
you are quite right: the second delivery (3 pallets, 1,260 kg) was charged at the old rate of $0.87 per kilogram and
not at the agreed rate of $0.79. The difference is $100.80, which we have credited to your account today. Please find
attached a corrected statement. We apologise for the trouble this has caused, and for the fact that our first reply
did not answer your question. If anything else is unclear, you can reach me directly at extension 415 on weekdays
between 9:00 and 16:30. Yours sincerely, Daniel Reyes, Customer Accounts.
---
Die Eisenbahn kam im Jahr 1869 in das Tal, und mit ihr kam die Zeit. Bis dahin hatte jede Kirche ihre eigene Uhr
gehabt, und niemanden störte es, wenn es im nächsten Dorf schon zehn Minuten später war. Der Fahrplan aber duldete
keine Ausnahmen. Der Lehrer schrieb in sein Tagebuch, die Bauern seien zuerst misstrauisch gewesen, dann neugierig und
schließlich pünktlich, und er wisse nicht, ob er sich darüber freuen solle. Heute hält hier nur noch der Bus, dreimal
am Tag, und die alte Bahnhofsuhr ist um zwanzig nach vier stehen geblieben.
---
Most of the stars that you can see without a telescope are larger and brighter than the Sun, and this is misleading,
because most of the stars that exist are smaller and dimmer. They are red dwarfs, and not one of them is visible to
the naked eye, though the nearest is only a little more than four light years away. A red dwarf burns its hydrogen so
slowly that it will still be shining a trillion years from now. The Sun has about five billion years left. The bright
blue stars of Orion will be gone in a few million, which is to say that they were not there when the first whales went
into the sea, and that they will not be there when the last ones, if we are careful, are still swimming.
---
Question: A train leaves the station at 8:15 and travels at 80 kilometres per hour. A second train leaves the same
station at 9:00 and travels in the same direction at 110 kilometres per hour. When does the second train catch up with
the first?

Answer: By 9:00 the first train has been under way for 45 minutes and has covered 60 kilometres. From then on the gap
shrinks by 110 - 80 = 30 kilometres every hour. It takes 60 / 30 = 2 hours to close it, so the second train catches up
at 11:00. By that time each of them is 220 kilometres from the station.
---
Quand ma grand-mère parlait de la guerre, elle ne parlait jamais des soldats. Elle parlait du sucre, du charbon, des
chaussures à semelles de bois qui faisaient un bruit de sabots sur les pavés, et d'un professeur de piano qui avait
échangé son instrument contre quarante kilos de pommes de terre. Elle disait que l'on s'habitue à tout, sauf au
silence des gens qui savent quelque chose. Puis elle se levait, elle vérifiait que la porte était bien fermée, et elle
remettait un morceau de sucre dans son café, qu'elle n'aimait pourtant pas sucré.
---
The court held that the contract was not void but voidable. In the opinion of the majority, a party who signs a
document without reading it is ordinarily bound by its terms; the law does not protect people from their own haste.
But where the other party knows that a term is unusual, and knows that it has not been read, silence may amount to
misrepresentation. The clause in question appeared on the reverse of the ninth page, in type smaller than that of the
rest, under the heading "Miscellaneous". Judge Harlow, dissenting, remarked that if small type were fraud then every
ticket to the opera was a crime, and that she preferred to leave such matters to the legislature.
---
SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue
FROM customers AS c
LEFT JOIN orders AS o ON o.customer_id = c.id AND o.created_at >= '2023-01-01'
WHERE c.country IN ('NL', 'BE', 'DE')
GROUP BY c.name
HAVING SUM(o.total) > 1000.00
ORDER BY revenue DESC
LIMIT 25;
---
Octopuses have three hearts, blue blood, and a nervous system that is mostly in their arms. Of the half a billion
neurons in a common octopus, about two thirds lie outside the brain, and an arm can taste, touch, and decide on its
own what to do with a crab. This raises a question that nobody knows how to answer, namely what it is like to be such
an animal, or whether it is like one thing at all. Divers who have spent time with them report that they recognise
faces, that they hold grudges, and that they get bored. They live for a year or two. Whatever an octopus learns, it
learns alone, for its parents are dead before it hatches.
---
The goalkeeper had not touched the ball for twenty minutes when the long pass came over the top. She saw it late,
because of the low sun, and for a moment she stood still, neither coming out nor going back. Then she ran. The striker
ran too. There were thirty metres between them and then ten, and the whole stadium, which had been singing, stopped. It
bounced once. She threw herself forward with both fists, felt the leather and then the boot, and heard, before she
felt any pain, the noise of forty thousand people breathing out. When she opened her eyes the referee was pointing the
other way. "Well," said the striker, sitting up, "that was stupid of both of us."
---
En el mercado de los jueves se vende de todo: tomates, relojes, gallinas vivas, cables, santos de yeso y teléfonos que
alguien perdió la semana pasada. Mi tío tenía un puesto de libros usados entre el afilador y la señora de las
aceitunas. No ponía precios. Miraba al cliente, miraba el libro y decía una cifra que casi siempre era justa. A los
estudiantes les fiaba, a los profesores les cobraba el doble, y a los niños les regalaba las novelas de piratas con
una sola condición: que volvieran a contarle el final, porque él, según decía, nunca había tenido tiempo de leerlas.
---
To change a flat tyre on a bicycle, first open the brake and take out the wheel. Let out whatever air is left. Push
the bead of the tyre towards the middle of the rim, where the channel is deepest, and work a lever under it on the
side opposite the valve. Hook the lever to a spoke, insert a second one ten centimetres further on, and the rest will
come away by hand. Before you put in a new tube, find out what made the hole: run your fingers slowly around the
inside of the tyre, and look through it against the light. Three times out of four there is a splinter of glass still
in it, and a new tube will last exactly as long as it takes you to get home.
---
Inflation is often described as too much money chasing too few goods, and as far as it goes the description is fair.
But prices do not rise all at once, nor by the same amount, and it is in the difference between them that the damage
is done. In the spring of that year rents had gone up by 4.1 percent, bread by 11.6 percent, and wages by 2.3 percent;
the official index, which is an average, stood at 5.2. Those who owed money were pleased. Those who had saved it were
not. A pensioner interviewed on the radio said that she had never in her life bought an average, and that she would
like to know in which shop it was to be had.
---
#include <stdio.h>
#include <stdlib.h>

/* Counts the lines, words and bytes of a stream, like wc. */
int main(void) {
    long lines = 0, words = 0, bytes = 0;
    int c, in_word = 0;
    while ((c = getchar()) != EOF) {
        bytes++;
        if (c == '\\n') lines++;
        if (c == ' ' || c == '\\t' || c == '\\n') {
            in_word = 0;
        } else if (!in_word) {
            in_word = 1;
            words++;
        }
    }
    printf("%7ld %7ld %7ld\\n", lines, words, bytes);
    return EXIT_SUCCESS;
}
---
The house had been empty since the autumn, but somebody had been winding the clock. Marta noticed it as soon as she
came into the hall: a slow, heavy tick, like a drop falling into a barrel. She put down her suitcase and listened. The
dust lay thick on the banister and on the frames of the pictures, and there were no footprints on the floor except
her own. It was an eight-day clock. She counted back on her fingers. Then she went into the kitchen, took the bread
knife out of the drawer, felt foolish, put it back, and said in a loud voice, "I know that you are here, and I would
like you to come down and explain yourself." After a while, upstairs, a door opened.
---
2024-02-29 06:12:07 INFO  scheduler: 3 jobs queued, 1 running, 0 failed
2024-02-29 06:12:09 WARN  storage: volume /data1 is 91% full (1,842 GB of 2,024 GB)
2024-02-29 06:12:31 INFO  worker-7: job 55182 finished in 21.94 s (exit code 0)
2024-02-29 06:13:02 ERROR worker-4: job 55183 lost its connection: timed out after 30000 ms
2024-02-29 06:13:02 INFO  scheduler: job 55183 will be tried again (attempt 2 of 5)
2024-02-29 06:13:40 INFO  worker-2: job 55183 finished in 36.02 s (exit code 0)
---
Проводник принёс чай в тонких стаканах с тяжёлыми подстаканниками и сказал, что до утра остановок не будет. За окном
тянулся лес, чёрный и ровный, и только изредка мелькал огонёк на переезде.
窓の外では雪が静かに降っていた。列車は三時間遅れていたが、誰も文句を言わなかった。春天来的时候，河边的柳树先绿，然后是山上的茶园，最后才是城里的人换上薄衣服。
Η θάλασσα ήταν ήσυχη και το καράβι έφυγε στην ώρα του. 비가 그치자 아이들이 골목으로 뛰어나왔다. 🌧️ → ☀️
---
A vaccine teaches the body to recognise an enemy that it has not met. The first one to be used widely, against
smallpox, was made from the pus of infected cows, and the word itself comes from the Latin for cow. Nobody at the time
knew what a virus was, and nobody would see one for another hundred and forty years. What they had was an observation
(that milkmaids seldom caught the disease), a hypothesis, and a willingness to try it on a gardener's son, which no
committee would permit today. In 1980 smallpox was declared extinct. It remains the only human disease of which this
can be said, although polio, after decades of work, is down to a few dozen cases a year in two countries.
---
Concerning the tuning of a piano, there is bad news: it cannot be done. If you tune twelve perfect fifths in a row,
each with the ratio 3:2, you ought to arrive seven octaves above the note from which you began, but you do not. You
arrive a little too high, by a ratio of 531441 to 524288, or about a quarter of a semitone. This error is called the
comma, and it has to go somewhere. Earlier centuries hid it in keys that nobody used, with the result that music in
those keys howled like a wolf. Ours divides it equally among all twelve fifths, so that every key is slightly wrong
and none is unbearable. One might say that it is the most successful compromise in the history of art.
---
import { useEffect, useState } from "react";

export function useDebounced<T>(value: T, delayMs = 250): T {
  const [debounced, setDebounced] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setDebounced(value), delayMs);
    return () => clearTimeout(timer);
  }, [value, delayMs]);
  return debounced;
}
---
On the island there were two villages and one doctor, and the road between them went over the mountain. In winter the
doctor crossed it on skis. He was not a brave man, as he would tell you himself; he was afraid of avalanches, of dogs,
and of the widow who kept the inn halfway, because she had once asked him a question to which he had given the wrong
answer. But he had sworn an oath when he was twenty-four, and at sixty he could not see how to get out of it. So when
the telephone rang at two in the morning, he would look at the barometer, say a word that he had learned in the navy,
and go and wax his skis.
---
Photosynthesis can be summarised in one line: 6 CO2 + 6 H2O + light -> C6H12O6 + 6 O2. The line hides nearly
everything that is interesting. The oxygen does not come from the carbon dioxide, as it seems to, but from the water.
The sugar is not made in the light but by a cycle of reactions that would run just as well in the dark, provided that
somebody delivered the energy. And the enzyme that fixes the carbon, which is probably the most abundant protein on
Earth, is so slow and so clumsy that it mistakes oxygen for carbon dioxide about one time in four. Every forest and
every field of wheat depends upon it. Evolution has had three billion years to find something better and has not.
'''
