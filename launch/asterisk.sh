#!/usr/bin/env bash
# Turns the English prompts of Debian's Asterisk packages, about 25 minutes of one real speaker at 16 kHz, into a corpus
# as LJSpeech has it: metadata.csv and wavs/. Recorded by Allison Smith, CC-BY-SA-3.0.
#
#   bash launch/asterisk.sh [OUT]     OUT: folder of the corpus (default out/asterisk)
#
# Needs apt-get (no root) and ffmpeg. What the list calls a sound ("[beep]") gets an empty transcript; `prepare tokens`
# then leaves it out by name.
# Environment: FFMPEG (default ffmpeg) the program.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

OUT=${1:-out/asterisk} FFMPEG=${FFMPEG:-ffmpeg} LIST=core-sounds-en
mkdir -p "$OUT/debian" "$OUT/wavs"
(
    cd "$OUT/debian"
    [[ -d usr ]] || {
        apt-get download "asterisk-$LIST" "asterisk-$LIST-g722"
        for package in *.deb; do dpkg -x "$package" .; done
    }
)
zcat "$OUT/debian/usr/share/doc/asterisk-$LIST/$LIST.txt.gz" | tr -d '\r' |
    sed -nE '/^;/d; s/[[<(][^])>]*[])>]//g; s/^([A-Za-z0-9_/-]+): */\1|/p' >"$OUT/metadata.csv"
voice="$OUT/debian/usr/share/asterisk/sounds/en_US_f_Allison"
(cd "$voice" && find . -name '*.g722' -printf '%P\n') | sort | while read -r file; do
    wav="$OUT/wavs/${file%.g722}.wav"
    mkdir -p "$(dirname "$wav")"
    [[ -f $wav ]] || "$FFMPEG" -nostdin -loglevel error -f g722 -i "$voice/$file" -f wav -y "$wav.part"
    [[ -f $wav ]] || mv "$wav.part" "$wav"
done
echo "$OUT: $(wc -l <"$OUT/metadata.csv") transcripts, $(find "$OUT/wavs" -name '*.wav' | wc -l) recordings"
