// In this file: the word lists, the plots, and the small expander that turns a plot into a story.
//
// A plot is a text with two kinds of holes:
//   {thing}     a word of the list `thing`. It is drawn at its first use and stays the same until the story ends;
//               {thing2} and {thing3} are other words of the same list, kept in the same way.
//   [big|old]   one of these texts, drawn anew each time; they may hold slots, not further brackets.
// {he} {him} {his} {himself} {boy} follow the gender of {name}, {he2} ... that of {name2}. {a:thing} puts "a" or "an"
// before the word, a capital letter in the slot ({He}, {A:thing}) one at the start of what it writes.
//
// To add a story, add a plot. To add a word, add it to a list: things are singular and can be carried, words after
// {a:...} sound the way they are spelled ("an owl", but no "hour" or "unicorn"), verbs are in the past tense.
#include "data/stories.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>
#include <strings.h>

#include "kernels/random.h"
#include "kernels/fail.h"

// ---- words ----

// He and she in turn: the index of a name gives its gender.
static const char *const name[] = {
    "Ben",  "Anna",  "Tom",   "Lily", "Sam",   "Mia", "Max",  "Ella",  "Leo",  "Rosa", "Jack",  "Emma",
    "Tim",  "Nina",  "Finn",  "Lucy", "Oscar", "Ida", "Paul", "Clara", "Hugo", "Zoe",  "Noah",  "Ruth",
    "Adam", "Molly", "Peter", "Jane", "Felix", "Eva", "Theo", "Alice", "Luke", "Sara", "Henry", "Grace",
};
static const char *const pronouns[][2] = {
    {"he", "she"}, {"him", "her"}, {"his", "her"}, {"himself", "herself"}, {"boy", "girl"},
};

static const char *const animal[] = {
    "fox",   "rabbit",   "mouse", "frog",  "cat",    "dog",   "goat",   "pony",   "hedgehog", "squirrel",
    "otter", "badger",   "mole",  "deer",  "turtle", "lamb",  "donkey", "beaver", "bear",     "pig",
    "calf",  "chipmunk", "toad",  "horse", "lizard", "snail", "ox",     "weasel", "sheep",    "cow",
};
static const char *const bird[] = {
    "owl", "crow", "robin", "eagle", "sparrow", "swan", "goose", "dove", "parrot", "stork", "swallow", "blackbird",
};
static const char *const pet[] = {"kitten", "puppy", "mouse", "hedgehog", "rabbit", "frog", "owl", "duckling"};
static const char *const fast[] = {"horse", "fox", "rabbit", "deer", "dog", "cat", "weasel", "pony"};
static const char *const slow[] = {"turtle", "snail", "toad", "mole", "worm", "beetle", "ant", "caterpillar"};
static const char *const thing[] = {
    "ball",  "hat",    "key",     "book",   "drum",     "doll",    "comb",    "cup",    "spoon",  "ring",     "bell",
    "scarf", "basket", "box",     "coin",   "lamp",     "flute",   "brush",   "button", "stone",  "shell",    "ribbon",
    "bag",   "bottle", "whistle", "mirror", "umbrella", "blanket", "feather", "wagon",  "marble", "necklace",
};
static const char *const fragile[] = {
    "cup", "bowl", "lamp", "kite", "toy boat", "toy train", "clock", "flute", "plate", "music box", "mirror", "drum",
};
static const char *const color[] = {
    "red", "blue", "green", "yellow", "white", "black", "orange", "purple", "golden", "silver", "pink", "brown",
};
static const char *const place[] = {
    "garden",  "forest", "lake", "river", "hill",   "market", "meadow", "beach",   "mill", "farm",
    "orchard", "castle", "cave", "field", "school", "pond",   "harbor", "village", "park", "valley",
};
static const char *const spot[] = {
    "old tree", "big rock",     "wooden gate", "stone wall", "green bush", "rose bush",  "old well",
    "haystack", "broken fence", "tall oak",    "woodpile",   "apple tree", "iron bench", "little bridge",
};
static const char *const weather[] = {
    "sunny", "windy", "cold", "warm", "cloudy", "foggy", "bright", "rainy", "misty", "quiet", "fine", "chilly",
};
static const char *const day[] = {"morning", "afternoon", "day", "evening"};
static const char *const kind[] = {
    "kind", "little", "brave", "clever", "shy", "cheerful", "young", "gentle", "busy", "curious", "quiet", "friendly",
};
static const char *const sad[] = {"sad", "worried", "upset", "unhappy", "gloomy"};
static const char *const glad[] = {"happy", "glad", "proud", "thankful", "full of joy", "very pleased"};
static const char *const went[] = {
    "walked", "ran", "hurried", "skipped", "went", "wandered", "marched", "raced", "strolled", "rushed",
};
static const char *const said[] = {"said", "answered", "replied"};
static const char *const food[] = {
    "apple", "pie", "bun", "sandwich", "pear", "cookie", "muffin", "peach", "pancake", "plum", "egg", "orange",
};
static const char *const cake[] = {"apple", "plum", "honey", "lemon", "nut", "carrot", "cherry", "almond"};
static const char *const flour[] = {"flour", "sugar", "milk", "butter", "cream", "honey"};
static const char *const chore[] = {
    "carry the wood", "sweep the floor", "wash the pots", "feed the hens", "water the plants", "clean the windows",
};
static const char *const neighbor[] = {
    "baker", "farmer", "miller", "teacher", "fisherman", "gardener", "shepherd", "tailor", "painter", "old sailor",
};
static const char *const family[] = {"mother", "father", "grandmother", "grandfather", "aunt", "uncle"};
static const char *const flower[] = {"rose", "sunflower", "tulip", "daisy", "violet", "iris", "poppy"};
static const char *const game[] = {"hide and seek", "tag", "catch", "chess", "pirates", "marbles", "knights"};
static const char *const number[] = {"three", "four", "five", "six", "seven", "ten"};

static const char *const opening[] = {
    "Once upon a time, there was {a:kind} {boy} named {name}. One {weather} {day}, {he} {went} to the {place}.",
    "One {weather} {day}, {name} {went} to the {place}.",
    "{name} lived in a little house near the {place}. One {weather} {day}, {he} went out to play.",
    "{name} was {a:kind} {boy} who loved the {place}. It was {a:weather} {day}, and {he} {went} there [again|alone].",
};
static const char *const two[] = {
    "{name} and {name2} lived near the {place}.",
    "{name} and {name2} were best friends.",
    "Once upon a time, there were two friends named {name} and {name2}.",
};
static const char *const home[] = {
    "Then {name} {went2} home with a big smile.",
    "That night, {name} slept very well.",
    "{name} told {his} {family} all about it at dinner.",
    "When the stars came out, {name} was still smiling.",
    "It was the best {day} of that year.",
};

// ---- plots ----

static const char *const plot[] = {
    // A lost thing is found.
    "{opening} {He} took {his} {color} {thing} along. But on the way, the {thing} was gone! {name} looked behind the "
    "{spot}, but it was not there. {He} felt {sad}. Then {a:animal} came by. \"Why are you so {sad}?\" asked the "
    "{animal}. \"I lost my {color} {thing},\" {said} {name}. \"[I saw it|There is something {color}] near the "
    "{spot2},\" said the {animal}. They {went2} to the {spot2}, and there was the {thing}! \"Thank you for your "
    "help!\" said {name}. {He} was {glad}. {home}",

    // A kite in a tree.
    "It was a windy {day}, and {name} took {his} {color} kite to the {place}. The kite went up, up, up into the sky. "
    "Then the wind blew hard, and the kite was stuck in a tall tree. {name} pulled the string, but the kite did not "
    "come down. {He} was {sad}. {A:bird} sat on a branch. \"Can you help me, please?\" called {name}. \"Of course I "
    "can,\" {said} the {bird}. It pulled at the kite with its beak, and the kite came down at last. {name} was "
    "{glad}. {He} gave the {bird} some [bread|seeds|crumbs|corn], and they stayed friends from that day on.",

    // Sharing food.
    "{two} One {weather} day, they {went} to the {place} to eat lunch. {name2} opened {his2} bag, but it was empty. "
    "\"Oh no, I forgot my {food}!\" said {name2}. {He2} was hungry and {sad}. {name} had only one {food2}. {He} "
    "looked at it for a while. Then {he} cut it in two. \"Half of my {food2} is for you,\" said {name}. \"You are so "
    "kind,\" {said} {name2}. They sat near the {spot} and ate together. No {food2} ever tasted so good. The next "
    "day, {name2} gave {name} {a:color} {thing} to say thank you.",

    // Helping an animal that later helps in return.
    "{opening} Near the {spot}, {he} heard a [small|strange|soft] sound. It was {a:animal} under a heavy branch. "
    "\"Please help me,\" said the {animal}. \"I cannot move my leg.\" {name} pulled, but the branch was too heavy. "
    "So {he} {went2} to {name2} and asked for help, and {name2} came at once. \"One, two, three!\" they called, and "
    "the {animal} was free. \"I will not forget this,\" it said. {Number} days later, {name} lost {his} way in the "
    "[fog|forest|dark]. {He} felt {sad}. But the {animal} found {him} and led {him} home. {name} was {glad}.",

    // Giving back what was found.
    "{opening} Near the {spot}, {he} found {a:color} {thing}. \"Whose {thing} is this?\" {he} asked. First {he} "
    "asked {a:animal}. \"It is not mine,\" {said} the {animal}. Then {he} asked the {neighbor}. \"It is not mine, "
    "but {name2} lost {a:thing} today,\" said the {neighbor}. {name} wanted to keep the {thing}, for it was very "
    "pretty. But {he} {went2} to {name2} and gave it back. \"My {thing}!\" cried {name2}. {He2} was {glad}. \"You "
    "are a true friend,\" {he2} said. {home}",

    // A noise in the night.
    "It was a dark and [rainy|stormy|windy|cold] night. {name} lay in bed and could not sleep. Tap, tap, tap! There "
    "was a noise at the [door|window]. {name} was afraid. \"Who is there?\" {he} asked, but nobody answered. {He} "
    "was {a:kind} {boy}, so {he} took {a:color} lamp and went to look. It was only a little {pet}, wet and cold. "
    "\"You are not scary at all!\" {name} laughed. {He} gave the {pet} some warm [milk|soup|bread] and a soft "
    "blanket. The {pet} slept next to {his} bed, and {name} was not afraid anymore.",

    // A seed that takes its time.
    "{name} had a tiny seed. {He} put it into the ground near the {spot}. Every {day} {he} gave it water and waited. "
    "But nothing came up. \"Maybe it is a bad seed,\" said {name}. {He} was {sad}. {A:animal} heard {him}. \"Good "
    "things take time,\" said the {animal}. \"You must wait a little longer.\" So {name} waited. {Number} days "
    "later, there was a small green leaf. It grew and grew, and soon {a:color} {flower} stood near the {spot}. \"It "
    "is the most beautiful {flower} I know!\" said {his} {family}. {name} was {glad}.",

    // The race.
    "Near the {place}, there lived {a:fast} that was very proud. \"I am the fastest of all,\" it said every {day}. "
    "\"Then let us race to the {spot},\" {said} {a:slow}. {name} stood at the {spot} to see who would win. The "
    "{fast} was soon far ahead. \"I have so much time,\" it thought, and it lay down to sleep. But the {slow} did "
    "not stop. Step by step, it came to the {spot}. \"The {slow} has won!\" called {name}. The {fast} woke up, and "
    "its face was red. It never [laughed at the {slow}|called itself the fastest|talked like that] again.",

    // Lost on the way home.
    "{opening} {He} wanted to pick {a:flower} for {his} {family}, and {he} went too far. The sun went down, and all "
    "the trees looked the same. \"I am lost,\" said {name}, and {he} began to cry. Then {a:bird} flew down from the "
    "{spot}. \"Do not cry,\" said the {bird}. \"Where do you live?\" \"I live in the house with the {color} door,\" "
    "{said} {name}. \"I know that house,\" said the {bird}. \"Follow me!\" It flew from tree to tree, and {name} "
    "{went2} after it. {His} {family} stood at the {color} door and hugged {him}. {name} was {glad}.",

    // A cake for a birthday.
    "It was the birthday of {name2}, and {name} wanted to bake {a:cake} cake. But there was no {flour} in the "
    "kitchen. {name} {went} to the {neighbor}. \"Do you have some {flour} for me?\" {he} asked. \"Yes,\" {said} the "
    "{neighbor}, \"but first, please help me {chore}.\" {name} was glad to help. Then {he} {went2} home with the "
    "{flour} and made the cake. Later, {name2} came with [{a:animal}|{his2} {family}|many friends]. \"This is the "
    "best {cake} cake in the world!\" said {name2}. They played {game} until it was dark.",

    // Telling the truth.
    "{two} One {day}, {name} played with the {color} {fragile} of {name2}. It fell down and broke! {name} was "
    "afraid. {He} wanted to hide the {fragile} behind the {spot}. But then {he} felt bad, and {he} {went} to "
    "{name2}. \"I am sorry,\" said {name}. \"I broke your {fragile}.\" {name2} was quiet for a while. \"Thank you "
    "for telling me the truth,\" {he2} said. They took the {fragile} to the {neighbor}, who mended it with some "
    "[glue|wire|string]. It was as good as new, and {name} and {name2} were friends as before.",

    // A bridge for an animal.
    "It had rained for {number} days, and the [river|stream|brook] was high. {A:animal} stood there and looked "
    "{sad}. \"I cannot get home,\" it said. \"The bridge is gone.\" {name} wanted to help. {He} {went} to {name2} "
    "and asked for [wood|boards|a rope]. Together they built a new bridge. It was hard work, and {name2} fell into "
    "the mud. \"Now you look like a pig!\" {name} laughed, and {name2} laughed too. Then the {animal} walked over "
    "the bridge. \"Thank you,\" it said, and it gave them {a:color} {thing}. The two friends were {glad}.",

    // A new friend.
    "{name} was new in the village near the {place}. {He} had no friends, and {he} felt {sad}. Every {day} {he} sat "
    "near the {spot} with {his} {color} {thing}. Then {name2} came by. {He2} was {a:kind} {boy2}. \"What do you have "
    "there?\" asked {name2}. \"It is my {thing},\" {said} {name}. \"Do you want to see it?\" \"Yes, please!\" said "
    "{name2}. They sat down and talked. After that, they played {game} until the sun went down. \"Will you come back "
    "tomorrow?\" asked {name}. \"Of course I will,\" said {name2}. Now {name} had a friend and was {glad}.",

    // A visit with a gift.
    "The {family} of {name} was ill and had to stay in bed. {name} wanted to bring {a:color} {flower}. {He} {went} "
    "to the {place} and looked everywhere, but there was no {flower}. \"What are you looking for?\" asked "
    "{a:animal}. \"{A:flower} for my {family},\" {said} {name}. \"Come with me,\" said the {animal}. Behind the "
    "{spot}, there were {number} of them! {name} took one and thanked the {animal}. Then {he} {went2} back and put "
    "the {flower} next to the bed. \"Now I feel much better,\" said {his} {family}. {name} was {glad}.",
};

// ---- expander ----

struct list {
    const char *name;
    const char *const *words;
    size_t count;
};
#define LIST(words)                                                                                                    \
    { #words, words, sizeof words / sizeof *words }
static const struct list lists[] = {
    LIST(name),   LIST(animal), LIST(bird),   LIST(pet),     LIST(fast),  LIST(slow),  LIST(thing),    LIST(fragile),
    LIST(color),  LIST(place),  LIST(spot),   LIST(weather), LIST(day),   LIST(kind),  LIST(sad),      LIST(glad),
    LIST(went),   LIST(said),   LIST(food),   LIST(cake),    LIST(flour), LIST(chore), LIST(neighbor), LIST(family),
    LIST(flower), LIST(game),   LIST(number), LIST(opening), LIST(two),   LIST(home),
};
enum { NAMES = 0, LISTS = sizeof lists / sizeof *lists, PRONOUNS = sizeof pronouns / sizeof *pronouns, DRAWS = 3 };

struct story {
    uint64_t *rng;
    int drawn[LISTS][DRAWS]; // index of the word behind {list}, {list2}, {list3}; -1: not drawn yet
    char *out;
    size_t used;
};

static void append(struct story *s, const char *text, size_t bytes) {
    if (s->used + bytes > STORIES_MAX_BYTES) fail_internal("stories", "longer than %d bytes", STORIES_MAX_BYTES);
    memcpy(s->out + s->used, text, bytes);
    s->used += bytes;
}

static bool is_drawn(const struct story *s, size_t list, int word) {
    for (int i = 0; i < DRAWS; i++) {
        if (s->drawn[list][i] == word) return true;
    }
    return false;
}

// The word behind a slot: drawn now, unlike the list's other words in this story, or the one drawn before.
static int draw(struct story *s, size_t list, int which) {
    int *word = &s->drawn[list][which];
    while (*word < 0) {
        int candidate = (int)random_below(s->rng, lists[list].count);
        if (!is_drawn(s, list, candidate)) *word = candidate;
    }
    return *word;
}

// What stands in a slot, found by its name without decorations.
static const char *find_word(struct story *s, const char *slot, size_t bytes, int which) {
    for (size_t i = 0; i < PRONOUNS; i++) {
        const char *key = pronouns[i][0];
        if (strlen(key) == bytes && strncasecmp(key, slot, bytes) == 0) return pronouns[i][draw(s, NAMES, which) % 2];
    }
    for (size_t i = 0; i < LISTS; i++) {
        const char *key = lists[i].name;
        if (strlen(key) == bytes && strncasecmp(key, slot, bytes) == 0) return lists[i].words[draw(s, i, which)];
    }
    fail_internal("stories", "no word list is named \"%.*s\"", (int)bytes, slot);
}

static void expand(struct story *s, const char *text, size_t bytes);

// slot: what stands between braces, as in "thing", "He2" or "A:animal".
static void expand_slot(struct story *s, const char *slot, size_t bytes) {
    size_t start = s->used;
    bool capital = isupper((unsigned char)*slot), article = bytes > 2 && slot[1] == ':';
    if (article) {
        slot += 2;
        bytes -= 2;
    }
    int which = 0;
    if (isdigit((unsigned char)slot[bytes - 1])) which = slot[--bytes] - '1';
    if (which < 0 || which >= DRAWS) fail_internal("stories", "{%.*s%d}: only 2 and 3", (int)bytes, slot, which + 1);
    const char *word = find_word(s, slot, bytes, which);
    if (article) {
        const char *a = strchr("aeiou", *word) ? "an " : "a ";
        append(s, a, strlen(a));
    }
    expand(s, word, strlen(word));
    if (capital) s->out[start] = (char)toupper((unsigned char)s->out[start]);
}

// choices: what stands between brackets, as in "big|old".
static void expand_choice(struct story *s, const char *choices, size_t bytes) {
    const char *end = choices + bytes;
    size_t count = 1;
    for (const char *c = choices; c < end; c++) count += *c == '|';
    for (uint64_t skip = random_below(s->rng, count); skip > 0; skip--) {
        choices = (const char *)memchr(choices, '|', (size_t)(end - choices)) + 1;
    }
    const char *bar = memchr(choices, '|', (size_t)(end - choices));
    expand(s, choices, (size_t)((bar ? bar : end) - choices));
}

static void expand(struct story *s, const char *text, size_t bytes) {
    const char *end = text + bytes;
    while (text < end) {
        if (*text != '{' && *text != '[') {
            append(s, text++, 1);
            continue;
        }
        const char *inside = text + 1;
        const char *close = memchr(inside, *text == '{' ? '}' : ']', (size_t)(end - inside));
        if (!close || close == inside) fail_internal("stories", "an unclosed or empty %c in \"%.30s\"", *text, text);
        (*text == '{' ? expand_slot : expand_choice)(s, inside, (size_t)(close - inside));
        text = close + 1;
    }
}

size_t stories_write(uint64_t *rng, char *out) {
    struct story s = {.rng = rng, .out = out};
    memset(s.drawn, -1, sizeof s.drawn);
    const char *text = plot[random_below(rng, sizeof plot / sizeof *plot)];
    expand(&s, text, strlen(text));
    return s.used;
}
