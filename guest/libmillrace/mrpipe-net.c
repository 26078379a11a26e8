/* Connections of mrpipe. */
#define _GNU_SOURCE
#include "mrpipe.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct addrinfo *resolve(char *address_text)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
	char *port = strrchr(address_text, ':');
	char *host = port ? address_text : NULL;
	struct addrinfo *found;

	if (port) {
		*port++ = '\0';
		if (*host == '[') {
			host++;
			host[strcspn(host, "]")] = '\0';
		}
	} else {
		port = address_text;
		hints.ai_flags |= AI_PASSIVE;
	}
	if (getaddrinfo(host, port, &hints, &found) != 0) {
		fprintf(stderr, "mrpipe: no such address\n");
		exit(2);
	}
	return found;
}

static int new_socket(const struct addrinfo *address)
{
	int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP);

	if (fd < 0)
		die("socket");
	return fd;
}

int open_listening(char *address_text)
{
	struct addrinfo *address = resolve(address_text);
	int fd = new_socket(address);
	int connection;

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
	if (bind(fd, address->ai_addr, address->ai_addrlen) < 0 || listen(fd, 1) < 0)
		die("listen");
	printf("listening\n");
	fflush(stdout);
	connection = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
	if (connection < 0)
		die("accept");
	close(fd);
	freeaddrinfo(address);
	return connection;
}

int open_connected(char *address_text)
{
	struct addrinfo *address = resolve(address_text);
	int fd = new_socket(address);

	if (connect(fd, address->ai_addr, address->ai_addrlen) < 0)
		die("connect");
	freeaddrinfo(address);
	return fd;
}

void send_all(int fd, const void *bytes, size_t len)
{
	while (len > 0) {
		ssize_t sent = send(fd, bytes, len, MSG_NOSIGNAL);

		if (sent < 0)
			die("send");
		bytes = (const char *)bytes + sent;
		len -= (size_t)sent;
	}
}

void read_line(int fd, char *line, size_t size)
{
	size_t len = 0;

	do {
		if (len + 1 == size || recv(fd, &line[len], 1, 0) <= 0)
			die("wait for a line");
	} while (line[len++] != '\n');
	line[len] = '\0';
}

void set_cork(int fd, int on)
{
	setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof(on));
}

void finish(int fd)
{
	char bytes[512];

	shutdown(fd, SHUT_WR);
	while (recv(fd, bytes, sizeof(bytes), 0) > 0)
		;
}
