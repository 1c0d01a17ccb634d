/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Cases with lists. See dma-bounce-test-list.c.
 */
#ifndef _DMA_BOUNCE_TEST_LIST_H
#define _DMA_BOUNCE_TEST_LIST_H

struct edu;

int edu_test_list(struct edu *edu);
int edu_test_max_segment(struct edu *edu);
int edu_test_min_align(struct edu *edu);
int edu_test_stale_list(struct edu *edu);

#endif /* _DMA_BOUNCE_TEST_LIST_H */
