// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: lists, which use one slot for all entries
 */

#include <kunit/test.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/printk.h>
#include <linux/scatterlist.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-kunit.h"
#include "dma-bounce-map.h"

#ifndef kunit_warning_suppress
/* In older kernels, a test cannot expect a warning. Suppress all messages instead. */
#define kunit_warning_suppress(test) \
	for (suppress_printk = !!(test); suppress_printk; suppress_printk = 0)
#endif

static const struct { unsigned int offset, len; } pieces[] = {
	{ 4096 - 700, 700 }, { 2 * 4096, 1024 }, { 5 * 4096 + 1024, 512 }, { 9 * 4096 + 1536, 333 },
};

#define PIECES		ARRAY_SIZE(pieces)
#define LIST_LEN	(700 + 1024 + 512 + 333)

static void init_list(struct bounce_test *t, struct scatterlist *sgl)
{
	unsigned int i;

	sg_init_table(sgl, PIECES);
	for (i = 0; i < PIECES; i++)
		sg_set_buf(&sgl[i], t->area + pieces[i].offset, pieces[i].len);
}

/* Returns true if @flat contains the bytes of the pieces of @area. */
static bool list_is(u8 *area, u8 *flat)
{
	unsigned int i;

	for (i = 0; i < PIECES; flat += pieces[i++].len)
		if (memcmp(area + pieces[i].offset, flat, pieces[i].len))
			return false;
	return true;
}

/* Maps the list for both directions. Returns a flat buffer of the list's length. */
static u8 *map_list(struct kunit *test, struct scatterlist *sgl)
{
	struct bounce_test *t = test->priv;
	u8 *flat = kunit_kzalloc(test, LIST_LEN, GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, flat);
	bounce_kunit_fill(t);
	bounce_kunit_warm(test, LIST_LEN, DMA_BIDIRECTIONAL);
	init_list(t, sgl);
	sg_dma_len(&sgl[1]) = SECRET;
	KUNIT_ASSERT_EQ(test, dma_map_sg(t->dev, sgl, PIECES, DMA_BIDIRECTIONAL), 1);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, sg_dma_address(sgl)));
	return flat;
}

static void list_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[PIECES];
	u8 *flat = map_list(test, sgl);
	unsigned int i;

	KUNIT_EXPECT_EQ(test, sg_dma_len(sgl), LIST_LEN);
	/* Some users of lists take a DMA length of 0 for the end. */
	KUNIT_EXPECT_EQ(test, sg_dma_len(&sgl[1]), 0);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	KUNIT_EXPECT_TRUE(test, list_is(t->area, flat));

	/* A sync copies the first two pieces back. Then unmapping copies all pieces back. */
	memset(flat, SECRET, LIST_LEN);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	dma_sync_sg_for_cpu(t->dev, sgl, 2, DMA_BIDIRECTIONAL);
	for (i = 0; i < PIECES; i++) {
		if (i == 2)
			bounce_kunit_expect_area(test);
		memset(t->expect + pieces[i].offset, SECRET, pieces[i].len);
	}
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
}

/* A list with one entry need not exist when its mapping is synchronised by address. */
static void list_of_one_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[1];
	u8 bytes[300];
	dma_addr_t addr;

	bounce_kunit_fill(t);
	bounce_kunit_warm(test, 1000, DMA_BIDIRECTIONAL);
	sg_init_one(sgl, t->area + 5000, 1000);
	KUNIT_ASSERT_EQ(test, dma_map_sg(t->dev, sgl, 1, DMA_BIDIRECTIONAL), 1);
	addr = sg_dma_address(sgl);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, addr));
	sg_init_one(sgl, t->area, 1000);
	memset(bytes, SECRET, sizeof(bytes));
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 100, bytes, sizeof(bytes)));
	memset(t->expect + 5000 + 100, SECRET, sizeof(bytes));
	dma_sync_single_for_cpu(t->dev, addr, 1000, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
	memset(t->area + 5000, 0x11, 1000);
	memset(t->expect + 5000, 0x11, 1000);
	dma_sync_single_for_device(t->dev, addr + 50, 950, DMA_BIDIRECTIONAL);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 50, bytes, sizeof(bytes)));
	KUNIT_EXPECT_MEMEQ(test, bytes, t->area + 5000 + 50, sizeof(bytes));
	/* Unmapping needs the original list. */
	sg_init_one(sgl, t->area + 5000, 1000);
	sg_dma_address(sgl) = addr;
	sg_dma_len(sgl) = 1000;
	memset(t->expect + 5000, SECRET, 1000);
	memset(bytes, SECRET, sizeof(bytes));
	for (unsigned int at = 0; at < 1000; at += 250)
		KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + at, bytes, 250));
	dma_unmap_sg(t->dev, sgl, 1, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
}

/* Sync for the device copies only the given entries, and nothing if the device only writes. */
static void list_sync_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[PIECES];
	u8 *flat = map_list(test, sgl);
	unsigned int i;

	for (i = 0; i < PIECES; i++)
		memset(t->area + pieces[i].offset, 0x11, pieces[i].len);
	dma_sync_sg_for_device(t->dev, sgl, PIECES, DMA_FROM_DEVICE);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	KUNIT_EXPECT_TRUE(test, list_is(t->expect, flat));

	dma_sync_sg_for_device(t->dev, sgl, 2, DMA_BIDIRECTIONAL);
	for (i = 0; i < 2; i++)
		memset(t->expect + pieces[i].offset, 0x11, pieces[i].len);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	KUNIT_EXPECT_TRUE(test, list_is(t->expect, flat));
	/* Unmapping overwrites the CPU's writes to the other entries. */
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
}

/* One slot is split into as many segments as the device needs. */
static void max_segment_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	unsigned int max = dma_get_max_seg_size(t->dev), i, sum = 0, n;
	struct scatterlist sgl[PIECES], *s;

	bounce_kunit_fill(t);
	bounce_kunit_warm(test, LIST_LEN, DMA_TO_DEVICE);
	init_list(t, sgl);
	dma_set_max_seg_size(t->dev, 1024);
	n = dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	/* Segments of 700, 1024, and 512 + 333 bytes */
	KUNIT_EXPECT_EQ(test, n, 3);
	for_each_sg(sgl, s, n, i) {
		KUNIT_EXPECT_LE(test, sg_dma_len(s), 1024);
		KUNIT_EXPECT_EQ(test, sg_dma_address(s), sg_dma_address(sgl) + sum);
		sum += sg_dma_len(s);
	}
	KUNIT_EXPECT_EQ(test, sum, LIST_LEN);
	if (n)
		dma_unmap_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	dma_set_max_seg_size(t->dev, max);
	bounce_kunit_expect_area(test);
}

/* A list whose pieces cannot be packed is mapped the ordinary way. */
static void list_layout_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u64 before = dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_LAYOUT);
	struct scatterlist sgl[PIECES];
	int n;

	bounce_kunit_fill(t);
	bounce_kunit_warm(test, SZ_8K, DMA_TO_DEVICE);
	dma_set_min_align_mask(t->dev, SZ_4K - 1);
	init_list(t, sgl);
	KUNIT_EXPECT_EQ(test, dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE), 1);
	KUNIT_EXPECT_EQ(test, offset_in_page(sg_dma_address(sgl)), 4096 - 700);
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	sgl[PIECES - 1].offset++;
	n = dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	KUNIT_EXPECT_GT(test, n, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, sg_dma_address(sgl)));
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_LAYOUT), before + 1);
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	dma_set_min_align_mask(t->dev, 0);
	bounce_kunit_expect_area(test);
}

/* Sync and unmap calls that start in the middle of a list have no effect. */
static void list_middle_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *flat = kunit_kmalloc(test, LIST_LEN, GFP_KERNEL);
	unsigned int max = dma_get_max_seg_size(t->dev), i;
	bool synced = false, unmapped = false;
	struct scatterlist sgl[PIECES];

	KUNIT_ASSERT_NOT_NULL(test, flat);
	bounce_kunit_fill(t);
	bounce_kunit_warm(test, LIST_LEN, DMA_FROM_DEVICE);
	init_list(t, sgl);
	/* With this limit, the second entry also gets an address in the slot. */
	dma_set_max_seg_size(t->dev, 1024);
	KUNIT_EXPECT_EQ(test, dma_map_sg(t->dev, sgl, PIECES, DMA_FROM_DEVICE), 3);
	dma_set_max_seg_size(t->dev, max);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, sg_dma_address(&sgl[1])));
	memset(flat, SECRET, LIST_LEN);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, sg_dma_address(sgl), flat, LIST_LEN));

	kunit_warning_suppress(test)
		synced = __dma_bounce_sync_sg(t->dev, &sgl[1], 2, DMA_FROM_DEVICE, false);
	bounce_kunit_expect_area(test);
	kunit_warning_suppress(test)
		unmapped = __dma_bounce_unmap_sg(t->dev, &sgl[1], PIECES - 1, 0);
	bounce_kunit_expect_area(test);
	/* True means that dma-iommu.c does not handle these calls either. */
	KUNIT_EXPECT_TRUE(test, synced);
	KUNIT_EXPECT_TRUE(test, unmapped);
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_FROM_DEVICE);
	for (i = 0; i < PIECES; i++)
		memset(t->expect + pieces[i].offset, SECRET, pieces[i].len);
	bounce_kunit_expect_area(test);
}

/* A sync call that is too long copies what is mapped. */
static void long_sync_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	bool synced = false;
	dma_addr_t addr;
	u8 bytes[256];

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = bounce_kunit_map_bounced(test, 1000, 256, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 256));
	kunit_warning_suppress(test)
		synced = __dma_bounce_sync_single(t->dev, addr + 56, 300, DMA_FROM_DEVICE, false);
	KUNIT_EXPECT_TRUE(test, synced);
	memset(t->expect + 1056, SECRET, 200);
	bounce_kunit_expect_area(test);
	memset(t->expect + 1000, SECRET, 56);
	dma_unmap_single(t->dev, addr, 256, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
}

static unsigned int slots_in_use(struct dma_bounce_pool *pool)
{
	struct dma_bounce_slots *slots = &pool->slots;
	struct dma_bounce_chunk *chunk;
	unsigned int used = 0;
	unsigned long place;

	mutex_lock(&slots->mutex);
	dma_bounce_slots_flush(slots, true);
	for (place = 0; place < dma_bounce_slots_places(slots); place++) {
		chunk = dma_bounce_slots_chunk(slots, place);
		if (chunk)
			used += dma_bounce_chunk_used(slots, chunk);
	}
	mutex_unlock(&slots->mutex);
	return used;
}

/* A list may be synchronised through a copy. A later sync call by address must not use the copy. */
static void list_copy_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[PIECES], copy[PIECES];
	u8 *flat = map_list(test, sgl);
	unsigned int i;

	memcpy(copy, sgl, sizeof(copy));
	dma_sync_sg_for_device(t->dev, copy, PIECES, DMA_TO_DEVICE);
	/* Point the copy to other memory, so that the test notices if the copy is used. */
	sg_init_table(copy, PIECES);
	for (i = 0; i < PIECES; i++)
		sg_set_buf(&copy[i], t->area + AREA - SZ_4K, pieces[i].len);
	memset(flat, SECRET, LIST_LEN);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	dma_sync_single_for_cpu(t->dev, sg_dma_address(sgl), 700 + 1024, DMA_FROM_DEVICE);
	for (i = 0; i < 2; i++)
		memset(t->expect + pieces[i].offset, SECRET, pieces[i].len);
	bounce_kunit_expect_area(test);
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_BIDIRECTIONAL);
	for (i = 2; i < PIECES; i++)
		memset(t->expect + pieces[i].offset, SECRET, pieces[i].len);
	bounce_kunit_expect_area(test);
}

/* Entries without a segment lose their old address, which may now belong to another list. */
static void list_stale_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[PIECES], other[1];
	unsigned int i;

	bounce_kunit_fill(t);
	bounce_kunit_warm(test, LIST_LEN, DMA_TO_DEVICE);
	bounce_kunit_warm(test, 1000, DMA_TO_DEVICE);
	sg_init_one(other, t->area + 40000, 1000);
	KUNIT_ASSERT_EQ(test, dma_map_sg(t->dev, other, 1, DMA_TO_DEVICE), 1);
	init_list(t, sgl);
	for (i = 1; i < PIECES; i++) {
		sg_dma_address(&sgl[i]) = sg_dma_address(other);
		sg_dma_len(&sgl[i]) = 1000;
	}
	KUNIT_EXPECT_EQ(test, dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE), 1);
	for (i = 1; i < PIECES; i++) {
		KUNIT_EXPECT_EQ(test, sg_dma_address(&sgl[i]), DMA_MAPPING_ERROR);
		KUNIT_EXPECT_EQ(test, sg_dma_len(&sgl[i]), 0);
	}
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	dma_unmap_sg(t->dev, other, 1, DMA_TO_DEVICE);
	bounce_kunit_expect_area(test);
}

/* As in mainline, a list with one entry may be unmapped as a buffer, and a buffer as a list. */
static void list_or_page_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[1];
	dma_addr_t addr;
	u8 bytes[1000];

	memset(bytes, SECRET, sizeof(bytes));
	bounce_kunit_fill(t);
	bounce_kunit_warm(test, 1000, DMA_BIDIRECTIONAL);
	sg_init_one(sgl, t->area + 5000, 1000);
	KUNIT_ASSERT_EQ(test, dma_map_sg(t->dev, sgl, 1, DMA_BIDIRECTIONAL), 1);
	addr = sg_dma_address(sgl);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, addr));
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 1000));
	memset(t->expect + 5000, SECRET, 1000);
	/* Avoid the DMA API's debugging, which requires map and unmap calls of the same type. */
	KUNIT_EXPECT_TRUE(test, dma_bounce_unmap_page(t->dev, addr, 0));
	bounce_kunit_expect_area(test);

	addr = bounce_kunit_map(test, 20000, 1000, DMA_BIDIRECTIONAL, 0);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, addr));
	sg_init_one(sgl, t->area + 20000, 1000);
	sg_dma_address(sgl) = addr;
	sg_dma_len(sgl) = 1000;
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 500));
	memset(t->expect + 20000, SECRET, 500);
	iommu_dma_sync_sg_for_cpu(t->dev, sgl, 1, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 1000));
	memset(t->expect + 20000, SECRET, 1000);
	iommu_dma_unmap_sg(t->dev, sgl, 1, DMA_BIDIRECTIONAL, 0);
	bounce_kunit_expect_area(test);
	/* Both slots are free again. */
	KUNIT_EXPECT_EQ(test, slots_in_use(t->pool), 0);
}

static struct kunit_case bounce_list_cases[] = {
	KUNIT_CASE(list_test),
	KUNIT_CASE(list_of_one_test),
	KUNIT_CASE(list_sync_test),
	KUNIT_CASE(max_segment_test),
	KUNIT_CASE(list_layout_test),
	KUNIT_CASE(list_middle_test),
	KUNIT_CASE(long_sync_test),
	KUNIT_CASE(list_copy_test),
	KUNIT_CASE(list_stale_test),
	KUNIT_CASE(list_or_page_test),
	{ }
};

static struct kunit_suite bounce_list_suite = {
	.name		= "dma-bounce-list",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_list_cases,
};

kunit_test_suite(bounce_list_suite);
