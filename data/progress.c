#include "data/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/clock.h"

struct progress progress_begin(const char *what, uint64_t total) {
    return (struct progress){.what = what, .total = total, .shown = isatty(STDERR_FILENO), .start = clock_seconds()};
}

// A number with a K, M or G where it is large.
static const char *format_count(char text[16], double count) {
    static const char units[] = " KMG";
    int unit = 0;
    for (; count >= 10000 && unit < 3; unit++) count /= 1000;
    snprintf(text, 16, unit ? "%.1f%c" : "%.0f", count, units[unit]);
    return text;
}

void progress_show(struct progress *p, uint64_t done) {
    double now = clock_seconds(), seconds = now - p->start;
    if (!p->shown || now - p->last < 0.2 || seconds <= 0) return;
    p->last = now;
    char bar[31] = "", count[16], total[16], rate[16], eta[32] = "";
    double per_second = (double)done / seconds;
    if (p->total && done) {
        double share = done < p->total ? (double)done / (double)p->total : 1;
        memset(bar, '.', sizeof bar - 1);
        memset(bar, '#', (size_t)(share * (sizeof bar - 1)));
        snprintf(eta, sizeof eta, " | eta %.0f s",
                 (double)(p->total - (done < p->total ? done : p->total)) / per_second);
    }
    fprintf(stderr, "\r%s %s %s%s%s | %s/s%s\033[K", p->what, bar, format_count(count, (double)done),
            p->total ? "/" : "", p->total ? format_count(total, (double)p->total) : "", format_count(rate, per_second),
            eta);
    fflush(stderr);
}

void progress_end(struct progress *p) {
    if (p->last > 0) fputs("\r\033[K", stderr);
    *p = (struct progress){0};
}
