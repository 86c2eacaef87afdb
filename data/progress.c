#include "data/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/clock.h"

struct progress progress_begin(const char *what, const char *unit, uint64_t total) {
    return (struct progress){
        .what = what, .unit = unit, .total = total, .shown = isatty(STDERR_FILENO), .start = clock_seconds()};
}

// "480", "12.3 M" and the unit; thousands of a unit are better read with a letter.
static const char *format_count(char text[32], double count, const char *unit) {
    static const char *const thousands[] = {"", "K", "M", "G", "T"};
    int step = 0;
    for (; count >= 10000 && step < 4; step++) count /= 1000;
    const char *space = step || *unit ? " " : "";
    snprintf(text, 32, "%.*f%s%s%s", step ? 1 : 0, count, space, thousands[step], unit);
    return text;
}

void progress_show(struct progress *p, uint64_t done) {
    double now = clock_seconds(), seconds = now - p->start;
    if (!p->shown || now - p->last < 0.2 || seconds <= 0) return;
    p->last = now;
    char bar[31] = "", count[32], total[32], rate[32], eta[32] = "";
    double per_second = (double)done / seconds;
    if (p->total && done) {
        double share = done < p->total ? (double)done / (double)p->total : 1;
        memset(bar, '.', sizeof bar - 1);
        memset(bar, '#', (size_t)(share * (sizeof bar - 1)));
        snprintf(eta, sizeof eta, " | eta %.0f s",
                 (double)(p->total - (done < p->total ? done : p->total)) / per_second);
    }
    fprintf(stderr, "\r%s %s %s%s%s | %s/s%s\033[K", p->what, bar, format_count(count, (double)done, p->unit),
            p->total ? " of " : "", p->total ? format_count(total, (double)p->total, p->unit) : "",
            format_count(rate, per_second, p->unit), eta);
    fflush(stderr);
}

void progress_end(struct progress *p) {
    if (p->last > 0) fputs("\r\033[K", stderr);
    *p = (struct progress){0};
}
