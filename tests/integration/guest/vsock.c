// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Both ends of sockets between a guest and its host.
 *
 *   vsock
 *
 * Sends back all data that arrives at port 1024, on any number of connections, until the other side stops sending. Repeatedly
 * connects to port 5000 of the host, sends some MiB, shuts down its sending side, and reads a checksum of the data. It prints
 *
 *   CAROM-VSOCK cid           the program listens; cid is 4294967295 without a device
 *   CAROM-LOST why            a connection to port 1024 failed
 *   CAROM-CALLED n            the nth answer of port 5000 was right
 *   CAROM-CALL-WRONG what     an answer of port 5000 was wrong
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#define ECHO_PORT 1024
#define CALL_PORT 5000
#define CALL_BYTES (3 << 20)
#define BLOCK (32 * 1024)

static void die(const char *what)
{
	printf("CAROM-VSOCK-FAILED %s: %s\n", what, strerror(errno));
	exit(1);
}

static int write_all(int fd, const void *bytes, size_t len)
{
	const char *at = bytes;

	while (len) {
		ssize_t done = write(fd, at, len);

		if (done < 0)
			return -1;
		at += done;
		len -= done;
	}
	return 0;
}

static void *echo(void *argument)
{
	int fd = (int)(intptr_t)argument;
	char *block = malloc(BLOCK);
	ssize_t len;

	if (!block)
		die("cannot allocate memory");
	while ((len = read(fd, block, BLOCK)) > 0) {
		if (write_all(fd, block, len)) {
			len = -1;
			break;
		}
	}
	if (len < 0)
		printf("CAROM-LOST %s\n", strerror(errno));
	free(block);
	close(fd);
	return NULL;
}

static void *serve(void *argument)
{
	int listener = (int)(intptr_t)argument;

	for (;;) {
		int fd = accept(listener, NULL, NULL);
		pthread_t thread;

		if (fd < 0)
			die("cannot accept a connection");
		if (pthread_create(&thread, NULL, echo, (void *)(intptr_t)fd))
			die("cannot start a thread");
		pthread_detach(thread);
	}
	return NULL;
}

/* Fills a block with the next bytes of a sequence, and returns the continued checksum (FNV-1a). */
static uint64_t fill(unsigned char *block, uint64_t *state, uint64_t sum)
{
	for (int i = 0; i < BLOCK; i++) {
		*state = *state * 6364136223846793005ULL + 1442695040888963407ULL;
		block[i] = *state >> 56;
		sum = (sum ^ block[i]) * 0x100000001b3ULL;
	}
	return sum;
}

/* Makes one call. Returns 0 if the host answered, or a negative value if the connection failed. */
static int call(uint64_t seed)
{
	struct sockaddr_vm address = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = CALL_PORT };
	static unsigned char block[BLOCK];
	uint64_t sum = 0xcbf29ce484222325ULL;
	char answer[64], right[64];
	size_t got = 0;
	ssize_t len;
	int fd = socket(AF_VSOCK, SOCK_STREAM, 0);

	if (fd < 0)
		die("cannot create a socket");
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		goto nobody;
	for (long sent = 0; sent < CALL_BYTES; sent += BLOCK) {
		sum = fill(block, &seed, sum);
		if (write_all(fd, block, BLOCK))
			goto nobody;
	}
	if (shutdown(fd, SHUT_WR))
		goto nobody;
	while (got < sizeof(answer) - 1 && (len = read(fd, answer + got, sizeof(answer) - 1 - got)) > 0)
		got += len;
	/* The host may close the connection at any time, but its answers must be right. */
	if (!got)
		goto nobody;
	answer[got] = 0;
	snprintf(right, sizeof(right), "%016llx", (unsigned long long)sum);
	if (strcmp(answer, right))
		printf("CAROM-CALL-WRONG %s, but %s is right\n", answer, right);
	close(fd);
	return 0;
nobody:
	close(fd);
	return -1;
}

int main(void)
{
	struct sockaddr_vm address = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = ECHO_PORT };
	int listener = socket(AF_VSOCK, SOCK_STREAM, 0), device = open("/dev/vsock", O_RDONLY);
	unsigned int cid = VMADDR_CID_ANY, called = 0;
	pthread_t thread;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 128))
		die("cannot listen");
	/* This fails if the guest has no vsock device. */
	if (device >= 0 && ioctl(device, IOCTL_VM_SOCKETS_GET_LOCAL_CID, &cid))
		cid = VMADDR_CID_ANY;
	if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)listener))
		die("cannot start a thread");
	printf("CAROM-VSOCK %u\n", cid);
	for (uint64_t seed = 1;; seed++) {
		if (!call(seed))
			printf("CAROM-CALLED %u\n", ++called);
		usleep(100 * 1000);
	}
}
