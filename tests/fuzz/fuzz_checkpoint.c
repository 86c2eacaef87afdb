// model/checkpoint.c: a run folder with one checkpoint in it.
//
// Parts of an input: trainer.json, config.json, a.safetensors. In the first, "@1" stands for the size of config.json as
// it lies on the disk and "#1" for its hash, "@2" and "#2" for those of a.safetensors, and a '$' at the end for the
// member with the hash of the text before it, because mutations would hardly ever keep them right.
#include "model/checkpoint.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <sys/stat.h>

#include "data/hash.h"
#include "tests/fuzz/fuzz.h"

static uint64_t hash_of(const char *path) {
    unsigned char bytes[4096];
    struct hash h = hash_begin();
    FILE *file = fopen(path, "rb");
    for (size_t n; file && (n = fread(bytes, 1, sizeof bytes, file)) > 0;) hash_add(&h, bytes, n);
    if (file) fclose(file);
    return hash_end(&h);
}

// The text with sizes and hashes put in.
static char *fill_in(struct fuzz_part text, const char *const paths[], size_t *size) {
    char *filled = NULL;
    bool with_hash = text.size && text.data[text.size - 1] == '$';
    FILE *file = open_memstream(&filled, size);
    for (size_t i = 0; i < text.size - with_hash; i++) {
        size_t part = i + 1 < text.size ? (size_t)text.data[i + 1] - '1' : 2;
        struct stat info = {0};
        if (part < 2 && text.data[i] == '@' && stat(paths[part], &info) == 0)
            fprintf(file, "%jd", (intmax_t)info.st_size), i++;
        else if (part < 2 && text.data[i] == '#')
            fprintf(file, "%016" PRIx64, hash_of(paths[part])), i++;
        else
            fputc(text.data[i], file);
    }
    fflush(file);
    struct hash h = hash_begin();
    hash_add(&h, filled, *size);
    if (with_hash) fprintf(file, ",\n\t\"hash\":\t\"%016" PRIx64 "\"\n}\n", hash_end(&h));
    fclose(file);
    return filled;
}

static const char *write_run(const uint8_t *data, size_t size) {
    static const char step[] = "run/step-00000003";
    struct fuzz_part parts[3] = {0};
    fuzz_cut(data, size, parts, 3);
    mkdir(fuzz_path("run"), 0777);
    mkdir(fuzz_path(step), 0777);
    const char *paths[] = {fuzz_write("run/step-00000003/config.json", parts[1].data, parts[1].size),
                           fuzz_write_safetensors("run/step-00000003/a.safetensors", parts[2].data, parts[2].size)};
    char *trainer = fill_in(parts[0], paths, &size);
    fuzz_write("run/step-00000003/trainer.json", trainer, size);
    free(trainer);
    return fuzz_path(step);
}

static void load(const char *folder) {
    struct checkpoint c = {0};
    fuzz_arm(); // complete, but step or seed may be missing
    if (setjmp(fuzz_stop) == 0) {
        checkpoint_load_progress(folder, &c);
        fuzz_require(c.step >= 0 && c.sequences >= 0 && c.tokens >= 0);
        cJSON_Delete(c.options);
        cJSON_Delete(c.data);
    }
    fuzz_disarm();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[FILE_ERROR] = "", found[FILE_PATH];
    const char *folder = write_run(data, size), *run = fuzz_path("run");
    struct config config = {0};
    fuzz_require(checkpoint_exists(run));
    fuzz_require(checkpoint_trained_length(folder) >= 0);
    if (!checkpoint_read_config(folder, &config, error, sizeof error)) fuzz_check_error(error, sizeof error, folder);
    if (checkpoint_newest(run, found, sizeof found, stdout)) {
        fuzz_require(strcmp(found, folder) == 0);
        load(folder);
    }
    return 0;
}
