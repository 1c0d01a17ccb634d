/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Cases in which the device accesses memory that it should not reach. See dma-bounce-test-attack.c.
 */
#ifndef _DMA_BOUNCE_TEST_ATTACK_H
#define _DMA_BOUNCE_TEST_ATTACK_H

#include <linux/types.h>

struct edu;

int edu_test_attack(struct edu *edu);
int edu_test_narrow(struct edu *edu, u64 mask);

#endif /* _DMA_BOUNCE_TEST_ATTACK_H */
