"""Token ids for tests/test_tokenizer.c that nobody here computed: small vocabularies trained and applied by Hugging
Face's tokenizers.

    python3 tests/reference_tokenizers.py make       writes tests/reference/tokenizer_*.json and tokenizers.json anew
    python3 tests/reference_tokenizers.py compare TOKENIZER.json TEXT...
                                                     ids of UTF-8 text files, here and there
    python3 tests/reference_tokenizers.py characters TOKENIZER.json
                                                     the same for every character of Unicode in several surroundings

Needs the package tokenizers; the last two also need `make build/cpu/tests/tokenize_ids`. The C test needs only the files
in tests/reference/.
"""

import array
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tests" / "reference"
PROGRAM = ROOT / "build" / "cpu" / "tests" / "tokenize_ids"

# ---- the vocabularies ----

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]

# One sentence in many languages, and what programs are made of.
SENTENCES = """
The wind blew over the hill and the child didn't know whether it'd rain; they'll wait for us, we've said.
Der Wind wehte über den Hügel, und das Kind wusste nicht, ob es regnen würde; wir warten größtenteils draußen.
Le vent soufflait sur la colline et l'enfant ne savait pas s'il allait pleuvoir ; nous attendrons près de l'école.
El viento soplaba sobre la colina y el niño no sabía si iba a llover; ¿esperaremos aquí hasta mañana?
Wiatr wiał nad wzgórzem, a dziecko nie wiedziało, czy będzie padać; zaczekamy więc w środku.
Ветер дул над холмом, и ребёнок не знал, пойдёт ли дождь; мы подождём их у старой школы.
Вітер дув над пагорбом, і дитина не знала, чи піде дощ; ми зачекаємо їх біля школи.
Ο άνεμος φυσούσε πάνω από το λόφο και το παιδί δεν ήξερε αν θα βρέξει.
風が丘の上を吹き、子どもは雨が降るかどうか知りませんでした。私たちは学校の前で待ちます。コンピューターとデータ。
风吹过山丘，孩子不知道会不会下雨；我们在学校门口等他们。数据和计算机的世界。
바람이 언덕 위로 불었고 아이는 비가 올지 몰랐다. 우리는 학교 앞에서 기다릴 것이다.
هبت الريح فوق التل ولم يعرف الطفل إن كانت ستمطر؛ سننتظرهم عند المدرسة.
הרוח נשבה מעל הגבעה והילד לא ידע אם יירד גשם; נחכה להם ליד בית הספר.
हवा पहाड़ी के ऊपर बह रही थी और बच्चे को पता नहीं था कि बारिश होगी या नहीं।
ลมพัดผ่านเนินเขาและเด็กไม่รู้ว่าฝนจะตกหรือไม่ เราจะรอพวกเขาที่โรงเรียน
Gió thổi qua đồi và đứa trẻ không biết trời có mưa không; chúng tôi sẽ đợi ở trường.
Rüzgâr tepenin üzerinden esiyordu ve çocuk yağmur yağıp yağmayacağını bilmiyordu.
for (int i = 0; i < n; i++) sum += x[i] * y[i];    // 12345 67890 3.14159 0x1f
    if value is None: return {"key": [1, 2, 3], 'other': "a\\tb"}  # https://example.org/path?q=1&r=2
""".strip().split("\n")


def corpus():
    """Every sentence, and its words in other orders: enough repetition for merges of several steps."""
    for sentence in SENTENCES:
        words = sentence.split(" ")
        for shift in range(len(words)):
            yield " ".join(words[shift:] + words[:shift]) + "\n"


def train(name, steps, size, ignore_merges, pairs, special, plain=()):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = steps
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens(list(plain))
    data = json.loads(tokenizer.to_str())
    halves = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    data["model"]["merges"] = halves if pairs else [" ".join(m) for m in halves]
    path = REFERENCE / f"tokenizer_{name}.json"
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    return Tokenizer.from_file(str(path))


def isolated(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def vocabularies():
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = [AddedToken("<think>", normalized=True), AddedToken("<thinking>", normalized=False)]
    return {
        "gpt2": train("gpt2", words, 1500, False, False, ["<|endoftext|>"]),
        "llama3": train(
            "llama3",
            pre_tokenizers.Sequence([isolated(LLAMA3), bytes_only]),
            1500,
            True,
            True,
            ["<|begin_of_text|>", "<|end_of_text|>", "<|end_of_text|>>"],
        ),
        "deepseek": train(
            "deepseek",
            pre_tokenizers.Sequence([*map(isolated, DEEPSEEK), bytes_only]),
            1500,
            False,
            False,
            ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
            plain,
        ),
    }


# ---- the texts ----


def nasty_texts():
    spaces = ["\t", "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u180e", "\u2003", "\u200b"]
    spaces += ["\u2028", "\u2029", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff"]
    texts = ["", " ", "a", "  ", "   a", "a   ", "\0", "a\0b\0\0c", "\n", "\n\n\n", " \n \n  x", "x \r\n\r\n  y", "\t\tx\t y"]
    texts += [f"ab{s}cd {s} ef{s}{s}1{s}!{s}" for s in spaces]
    texts += [" ".join(f"I{q}{t}" for t in "s t re ve m ll d S T RE Ve M LL D ſ x".split()) for q in "'’"]
    texts += ["don't DON'T 'tis ''s '' 's's 'll'll", "x'ſ y'S", "a" * 200, "ab" * 150, " " * 70 + "x", "1" * 50, "!?" * 60]
    texts += ["1 12 123 1234 12345 1234567890", "٠١٢٣٤٥٦٧٨٩", "०१२३ ५६७", "１２３４", "Ⅷ ⅻ ½ ² ³ ① 〇 一二三", "3.14e-10 1,000,000 0x1F"]
    texts += ["e\u0301 a\u0308\u0304 \u0301x", "ÀÉÎõü ß ẞ ŉ ǆ ﬁ ﬆ", "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽 🇩🇪🇫🇷 ☺️", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀 𠀀𠀁"]
    texts += ["日本語とEnglishの混在テキスト123です。ｶﾀｶﾅ", "中文English混合，没有空格！", "한국어와 English 혼합", "русский English смесь"]
    texts += ["العربية مع English ١٢٣", "עברית עם English 123", "हिन्दी का पाठ क्षत्रिय", "ภาษาไทยไม่มีช่องว่าง", "ქართული ՀԱՅԵՐԵՆ ᐃᓄᒃᑎᑐᑦ"]
    texts += ["\u202eright to left\u202c", "\ue000\uf8ff\U000f0000\U0010ffff", "\ufffd\ufffe\uffff", "a\u00adb", "x\u034fy"]
    texts += ["_under_score __init__ a_1", "#include <stdio.h>\n\tint main(void) { return 0; }\n", "$x += @y->{z} ~ `w` ^ |v|"]
    texts += [r"C:\path\n \\ \" \/", '{"a": [1, 2.5, null], "b": "c"}', "<p class='x'>&nbsp;</p>\n<!-- -->", "https://a.b/c?d=e&f=%20#g"]
    special = ["<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|end_of_text|>>", "<｜begin▁of▁sentence｜>"]
    special += ["<｜end▁of▁sentence｜>", "<think>", "<thinking>"]
    texts += special + [f"a {t} b" for t in special] + [t[:-1] for t in special] + ["<" + t * 2 + ">\n" for t in special]
    texts += ["".join(special), "<think<think>ing><thinking", "x<｜end▁of▁sentence｜>y<think>\n\n<|endoftext|>  z"]
    return texts + SENTENCES


# ---- other ways to cut words, with the vocabulary of gpt2 ----

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = [r"\p{Han}+", r"\p{N}{3}", r"(?=(\d{3})+(?!\d))", r"x*", r"(?<=[a-e])\S|(?<!\d)\d", r"^\s+|\s+$", r".+", r"\D+?\d"]
PATTERNS += [r"[\p{Han}\p{^L}]+|\P{^Ll}", r"[^\S\n]+", r"\A.|.\z|\x41-\u0042\x{43}", r"(?>a|ab)c|\n{2,}|(o|e){1,2}?", r"[-a&~\-^]|[\]\[{}]"]


def variants():
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [bytes_only, pre_tokenizers.ByteLevel(add_prefix_space=True)]
    steps += [pre_tokenizers.Sequence([pre_tokenizers.Digits(individual), words]) for individual in (False, True)]
    steps += [pre_tokenizers.Sequence([isolated(p), bytes_only]) for p in (CL100K, O200K)]
    # What is removed shows every end of every match; cuts may hide where no merge reaches across them.
    steps += [pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "removed"), bytes_only]) for p in PATTERNS]
    for pattern in ("a", " ", "[", "1"):
        steps.append(pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), words]))
    for invert in (False, True):
        split = pre_tokenizers.Split(Regex(r"[\p{L}\d]+"), "removed", invert)
        steps.append(pre_tokenizers.Sequence([split, words]))
    steps.append(pre_tokenizers.Sequence([isolated(r"\p{N}"), pre_tokenizers.ByteLevel(add_prefix_space=True)]))
    return steps


VARIANT_TEXTS = ["The child didn't know, THEY'LL wait 12345 67.\r\n\r\n  abc acxx\u3000y xxx x", "\u180e \x85a\xa0b\t c\n \n\nd  "]
VARIANT_TEXTS += ["ВЕТЕР дул над Холмом №1234567", "風が丘の上を吹き、データ123。𠀀", "a-b[c]{d}^e&&f~g|ABC A-BC", "e\u0301ǅ ſ'ſ İi ß 1 ٢٣٤٥", "\n x\n", "1"]


def variant_entries(tokenizer):
    for steps in variants():
        tokenizer.pre_tokenizer = steps
        texts = [{"text": t.encode("utf-8").hex(), "ids": tokenizer.encode(t).ids} for t in VARIANT_TEXTS]
        yield {"pre_tokenizer": json.loads(tokenizer.to_str())["pre_tokenizer"], "texts": texts}


def write_lines(file, name, entries):
    file.write(f'"{name}":[\n' + ",\n".join(json.dumps(e, separators=(",", ":")) for e in entries) + "\n]")


def make():
    reference = []
    trained = vocabularies()
    for name, tokenizer in trained.items():
        for text in nasty_texts():
            ids = {}
            for special in (True, False):
                tokenizer.encode_special_tokens = not special
                ids[special] = tokenizer.encode(text, add_special_tokens=False).ids
            # JSON strings of the C reader end at the first zero, so the texts are hexadecimal.
            entry = {"tokenizer": name, "text": text.encode("utf-8").hex(), "special": ids[True]}
            reference.append(entry if ids[True] == ids[False] else {**entry, "plain": ids[False]})
    with open(REFERENCE / "tokenizers.json", "w", encoding="utf-8") as file:
        file.write("{")
        write_lines(file, "texts", reference)
        file.write(",\n")
        write_lines(file, "variants", variant_entries(trained["gpt2"]))
        file.write("}\n")
    print(f"{len(reference)} texts, {len(variants())} other ways to cut words")


# ---- comparing ----


def encode_here(path, file, special):
    arguments = [PROGRAM, path, file] + (["special"] if special else [])
    done = subprocess.run(arguments, check=True, capture_output=True)
    ids = array.array("i")
    ids.frombytes(done.stdout)
    return ids.tolist(), float(done.stderr)


def compare_text(path, tokenizer, data, name, special):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        here, seconds = encode_here(path, file.name, special)
    text = data.decode("utf-8")
    tokenizer.encode_special_tokens = not special
    start = time.monotonic()
    there = tokenizer.encode(text, add_special_tokens=False).ids
    other_seconds = time.monotonic() - start
    speed, other_speed = len(data) / seconds / 1e6, len(data) / other_seconds / 1e6
    first = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
    same = here == there
    print(
        f"{name} | {len(data)} bytes | {len(there)} ids | {'equal' if same else f'DIFFERENT from id {first} on'} | "
        f"{speed:.1f} MB/s here, {other_speed:.1f} MB/s there",
        flush=True,
    )
    if not same:
        print("   here ", [tokenizer.id_to_token(i) for i in here[max(first - 2, 0) : first + 5]])
        print("   there", [tokenizer.id_to_token(i) for i in there[max(first - 2, 0) : first + 5]])
    return same


def compare(path, files):
    tokenizer = Tokenizer.from_file(path)
    same = [compare_text(path, tokenizer, pathlib.Path(f).read_bytes(), f, special=True) for f in files]
    sys.exit(0 if all(same) else 1)


SURROUNDINGS = ["{}", " {}a", "a{}b", "1{}2", "!{}?", "x'{} y", "\n{}\n", "中{}\u0301"]
MARKER = "<|marker|>"


def show_cuts(path):
    """The steps of a tokenizer in front of a vocabulary that merges every pair of bytes that two characters meet in: no
    place where a text is cut stays hidden."""
    data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    names = [bytes_name(byte) for byte in range(256)]
    starts = [byte for byte in range(256) if byte & 0xC0 != 0x80]
    merges = [(a, names[b]) for a in names for b in starts]
    vocab = {text: i for i, text in enumerate(names + [a + b for a, b in merges])}
    data["model"] = {"type": "BPE", "vocab": vocab, "merges": merges}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    data["added_tokens"] = [{"id": len(vocab), "content": MARKER, "special": True, **flags}]
    return json.dumps(data)


def bytes_name(byte):
    """Bytes from 0xC0 on and printable ASCII are their own names; the others are seen in a character that holds them."""
    character = chr(byte)
    name = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0]
    return character if byte >= 0xC0 else name[-1]


def characters(path):
    """Every character in every surrounding, told apart by a token that only stands between them. What differs anywhere
    is named with the category that Python gives it."""
    different = set()
    with tempfile.TemporaryDirectory() as folder:
        file, text_file = pathlib.Path(folder) / "tokenizer.json", pathlib.Path(folder) / "text"
        file.write_text(show_cuts(path), encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(file))
        marker = tokenizer.token_to_id(MARKER)
        codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
        for surrounding in SURROUNDINGS:
            texts = [surrounding.format(chr(c)) for c in codes]
            text_file.write_bytes(MARKER.join(texts).encode("utf-8"))
            here, _ = encode_here(file, text_file, True)
            pieces = [[]]
            for i in here:
                if i == marker:
                    pieces.append([])
                else:
                    pieces[-1].append(i)
            assert len(pieces) == len(texts)
            bad = set()
            for start in range(0, len(texts), 50000):
                there = tokenizer.encode_batch(texts[start : start + 50000], add_special_tokens=False)
                bad |= {codes[start + i] for i, e in enumerate(there) if e.ids != pieces[start + i]}
            print(f"{surrounding!r}: {len(codes)} characters, {len(bad)} differ", flush=True)
            different |= bad
    print(f"{len(different)} characters differ somewhere; Python knows Unicode {unicodedata.unidata_version}")
    by_category = {}
    for c in sorted(different):
        by_category.setdefault(unicodedata.category(chr(c)), []).append(c)
    for category, members in by_category.items():
        print(f"  {category}: {len(members)}, such as", " ".join(f"U+{c:04X}" for c in members[:8]))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] == "make":
        make()
    elif len(sys.argv) > 3 and sys.argv[1] == "compare":
        compare(sys.argv[2], sys.argv[3:])
    elif len(sys.argv) == 3 and sys.argv[1] == "characters":
        characters(sys.argv[2])
    else:
        sys.exit(__doc__)
