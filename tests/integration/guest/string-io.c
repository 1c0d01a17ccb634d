// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Reads an I/O port many times by one string instruction.
 *
 *   string-io PORT N
 *
 * PORT is hexadecimal. Prints CAROM-STRING-IO and the N bytes that came, in hexadecimal.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/io.h>

int main(int argc, char **argv)
{
	uint8_t bytes[4096] = { 0 };
	unsigned long port, len, at;

	if (argc != 3 || iopl(3)) {
		perror("CAROM-STRING-IO-FAILED");
		return 1;
	}
	port = strtoul(argv[1], NULL, 16);
	len = strtoul(argv[2], NULL, 10);
	if (len > sizeof(bytes))
		return 1;
	insb(port, bytes, len);
	printf("CAROM-STRING-IO");
	for (at = 0; at < len; at++)
		printf(" %02x", bytes[at]);
	printf("\n");
	return 0;
}
