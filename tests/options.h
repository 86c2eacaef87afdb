// For tests of options and configurations: command lines and JSON as text, and refusals.
#ifndef MOK_TESTS_OPTIONS_H
#define MOK_TESTS_OPTIONS_H

#include "tests/child.h"

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "model/config.h"
#include "model/options.h"
#include "model/presets.h"

// "--flag value ..." split at spaces.
struct arguments {
    char copy[4096], *argv[64];
    int argc;
};

static inline void split(struct arguments *a, const char *line) {
    char *rest;
    *a = (struct arguments){.argv = {"train"}, .argc = 1};
    snprintf(a->copy, sizeof a->copy, "%s", line);
    for (char *word = strtok_r(a->copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) a->argv[a->argc++] = word;
}

static inline void parse(struct options *o, const char *line) {
    struct arguments a;
    split(&a, line);
    options_parse(o, a.argc, a.argv);
    if (!o->generate && !o->evaluate && !o->help) options_settle(o, 1, a.argc, a.argv);
}

static inline void parse_line(void *line) {
    struct options o;
    parse(&o, line);
}

static inline void validate(void *c) { config_validate(c); }

// One line, exit code 2, and every one of the words (ended by NULL) in it.
static inline void assert_refused(const char *what, int code, const char *message, const char *const *words) {
    if (code != 2) fail_msg("%s: exit code %d, wanted 2 (%s)", what, code, message);
    const char *end = strchr(message, '\n');
    if (!end || end[1] || strncmp(message, "mok: error: ", 12) != 0) fail_msg("%s: not one line: %s", what, message);
    for (; *words; words++)
        if (!strstr(message, *words)) fail_msg("%s: no '%s' in: %s", what, *words, message);
}

static inline void set_preset(struct options *o, const char *name) { assert_true(options_set_preset(o, name)); }

static inline const struct config *valid_config(const struct preset *p) {
    static struct config c;
    c = p->model;
    if (!c.vocab) c.vocab = 257;
    return &c;
}

static inline char *print_options(const struct options *o) {
    cJSON *json = options_to_json(o);
    char *text = cJSON_PrintUnformatted(json);
    assert_non_null(text);
    cJSON_Delete(json);
    return text;
}

static inline const char *read_options(struct options *o, const char *text) {
    cJSON *json = cJSON_Parse(text);
    assert_non_null(json);
    const char *wrong = options_from_json(o, json);
    cJSON_Delete(json);
    return wrong;
}

#endif
