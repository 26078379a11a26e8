/* mrpipe: moves files and streams, by a pipe, by calls that keep the bytes in the kernel, or
 * through memory, and reports the results, for tests and benchmarks.
 *
 * Each round that it sends, and receives with -g, is a header line "MRPIPE <round> <bytes>", the
 * bytes, and a trailer "END <round>". */
#define _GNU_SOURCE
#include "mrpipe.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: mrpipe (-l [ADDRESS:]PORT | -c ADDRESS:PORT) [options] FILE       send a file\n"
    "       mrpipe (-l [ADDRESS:]PORT | -c ADDRESS:PORT) -g [options] FILE    get a file\n"
    "       mrpipe -l [ADDRESS:]PORT -x ADDRESS:PORT [options]                pass a stream on\n"
    "       mrpipe -f [options] FROM TO                                       copy a file\n"
    "  -l  listen and take one connection    -c  connect\n"
    "  -p  pipe, never anything else\n"
    "  -s  plain sendfile, copy_file_range or splice\n"
    "  -w  read and write\n"
    "  -b  pipe, then the plain call for what was not piped (the default)\n"
    "  -n ROUNDS  -z BYTES (all)  -t TIMEOUT_MS of a pipe\n"
    "  -o OFFSET in FILE or FROM  -O OFFSET in TO\n"
    "  -e  what is written may exist and is not cut\n"
    "  -k  cork the socket from header to trailer\n"
    "  -r  wait for a line from the peer before each round; with -g, send it\n";

/* Modes of a run. */
enum kind { KIND_SEND, KIND_GET, KIND_PROXY, KIND_COPY };

void die(const char *action)
{
	fprintf(stderr, "mrpipe: %s: %s\n", action, strerror(errno));
	exit(1);
}

static void exit_with_usage(void)
{
	fputs(usage, stderr);
	exit(2);
}

static enum kind parse(int argc, char **argv, struct job *job)
{
	enum kind kind = KIND_SEND;
	int option;

	while ((option = getopt(argc, argv, "l:c:x:gfpswbn:o:O:z:t:ekr")) != -1) {
		switch (option) {
		case 'l': job->listen_at = optarg; break;
		case 'c': job->connect_to = optarg; break;
		case 'x': job->forward_to = optarg; kind = KIND_PROXY; break;
		case 'g': kind = KIND_GET; break;
		case 'f': kind = KIND_COPY; break;
		case 'p': job->mode = MODE_PIPE; break;
		case 's': job->mode = MODE_PLAIN; break;
		case 'w': job->mode = MODE_READ_WRITE; break;
		case 'b': job->mode = MODE_BOTH; break;
		case 'n': job->rounds = atol(optarg); break;
		case 'o': job->offset = atoll(optarg); break;
		case 'O': job->out_offset = atoll(optarg); break;
		case 'z': job->bytes = atoll(optarg); break;
		case 't': job->timeout_ms = (uint32_t)atol(optarg); break;
		case 'e': job->keep_content = 1; break;
		case 'k': job->cork = 1; break;
		case 'r': job->requests = 1; break;
		default: exit_with_usage();
		}
	}
	return kind;
}

static int is_valid(enum kind kind, const struct job *job, int paths)
{
	switch (kind) {
	case KIND_COPY:
		return paths == 2 && !job->listen_at && !job->connect_to;
	case KIND_PROXY:
		return paths == 0 && job->listen_at && !job->connect_to;
	default:
		return paths == 1 && !job->listen_at != !job->connect_to;
	}
}

int main(int argc, char **argv)
{
	struct job job = {.rounds = 1, .bytes = -1};
	struct totals totals = {0};
	enum kind kind = parse(argc, argv, &job);

	argv += optind;
	if (!is_valid(kind, &job, argc - optind))
		exit_with_usage();
	switch (kind) {
	case KIND_SEND: run_send(&job, argv[0], &totals); break;
	case KIND_GET: run_get(&job, argv[0], &totals); break;
	case KIND_PROXY: run_proxy(&job, &totals); break;
	case KIND_COPY: run_copy(&job, argv[0], argv[1], &totals); break;
	}
	return 0;
}
