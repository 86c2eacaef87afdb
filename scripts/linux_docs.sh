#!/bin/sh
# Makes token shards of real text that any Debian 12 machine can get: the documentation of Linux, 28 MB of English prose and
# examples in 5000 documents (the package linux-doc-6.1).
#
#   sh scripts/linux_docs.sh TOKENIZER PREFIX [FOLDER]
#
# TOKENIZER: bytes, or a tokenizer.json (of DeepSeek-V3, for example)   PREFIX: of the shards, as in data/linux
# FOLDER: texts that are here already (the Documentation folder of a kernel's source); else the package is downloaded
set -eu
export LC_ALL=C # the order of names

fail() {
    echo "linux_docs.sh: error: $*" >&2
    exit 2
}

[ $# = 2 ] || [ $# = 3 ] || fail "found $# arguments, wanted TOKENIZER PREFIX [FOLDER]"
[ -x ./tokenize ] || fail "found no ./tokenize here, wanted it; run make train first"
[ "$1" = bytes ] || [ -e "$1" ] || fail "found no tokenizer $1, wanted bytes or a tokenizer.json"
[ $# = 2 ] || [ -d "$3" ] || fail "found no folder $3, wanted one of texts"
package=linux-doc-6.1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
folder=${3-}
if [ -z "$folder" ]; then
    # As who we are: apt's own user may not write here, and root would be warned.
    (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package" && dpkg-deb -x ./*.deb .) ||
        fail "apt-get could not get $package, wanted it; name a folder of texts as the third argument"
    folder=$work/usr/share/doc/$package
fi

# One file a document, in the order of the names. What the package holds as web pages is left out.
mkdir "$work/text"
(cd "$folder" && find . -path ./html -prune -o -type f \( -name '*.rst' -o -name '*.txt' -o -name '*.rst.gz' -o -name '*.txt.gz' \) -print) |
    sort | while read -r file; do
    name=$(echo "${file#./}" | tr / _)
    case $file in
    *.gz) gzip -dc "$folder/$file" >"$work/text/${name%.gz}" ;;
    *) cp "$folder/$file" "$work/text/$name" ;;
    esac
done
[ "$(ls "$work/text")" ] || fail "found no .rst and no .txt below $folder, wanted texts"
./tokenize --tokenizer "$1" --out "$2" --eval-tokens 200000 "$work"/text/*
