/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Fixture of the KUnit tests of bounced DMA: a software device behind a software IOMMU, and memory
 * to map
 */
#ifndef _DMA_BOUNCE_KUNIT_H
#define _DMA_BOUNCE_KUNIT_H

#include <linux/dma-direction.h>
#include <linux/sizes.h>
#include <linux/types.h>

#include "dma-bounce-kunit-iommu.h"
#include "dma-bounce-types.h"

struct kunit;

/* Number of bytes of memory to map, and value of bytes that must not be visible */
#define AREA			SZ_64K
#define SECRET			0x5c

/**
 * struct bounce_test - state of a test
 * @fake:	the IOMMU and its device
 * @other:	another domain of the IOMMU, in tests that need one
 * @dev:	the device
 * @pool:	the pool of the device's domain
 * @area:	memory to map
 * @expect:	expected contents of @area
 * @seed:	seed of the pattern in @area
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
