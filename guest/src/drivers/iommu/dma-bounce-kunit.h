/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What each KUnit test of bounced DMA has: a device behind an IOMMU, both made of software, and
 * memory to be mapped
 */
#ifndef _DMA_BOUNCE_KUNIT_H
#define _DMA_BOUNCE_KUNIT_H

#include <linux/dma-direction.h>
#include <linux/sizes.h>
#include <linux/types.h>

#include "dma-bounce-kunit-iommu.h"
#include "dma-bounce-types.h"

struct kunit;

/* Bytes of memory to be mapped, and what stands for bytes that are not to be seen */
#define AREA			SZ_64K
#define SECRET			0x5c

/**
 * struct bounce_test - what each test has
 * @fake:	the IOMMU and its device
 * @other:	another domain of it, where one is needed
 * @dev:	the device
 * @pool:	the pool of its domain
 * @area:	memory that is mapped
 * @expect:	what it should hold
 * @seed:	of what the area is filled with
 */
struct bounce_test {
	struct fake_iommu	*fake;
	struct fake_iommu	*other;
	struct device		*dev;
	struct dma_bounce_pool	*pool;
	u8			*area;
	u8			*expect;
	u8			seed;
};

int bounce_kunit_init(struct kunit *test);
void bounce_kunit_exit(struct kunit *test);
void bounce_kunit_fill(struct bounce_test *t);
void bounce_kunit_expect_area(struct kunit *test);
void bounce_kunit_warm(struct kunit *test, size_t len, enum dma_data_direction dir);
dma_addr_t bounce_kunit_map(struct kunit *test, unsigned int offset, size_t len,
			    enum dma_data_direction dir, unsigned long attrs);
dma_addr_t bounce_kunit_map_bounced(struct kunit *test, unsigned int offset, size_t len,
				    enum dma_data_direction dir, unsigned long attrs);

#endif /* _DMA_BOUNCE_KUNIT_H */
