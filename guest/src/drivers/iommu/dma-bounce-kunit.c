// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: the allocator, and the DMA API with a device made of software
 *
 * Each test maps memory as a driver does, plays the device, and looks at all bytes afterwards, also
 * at those that nobody should have touched.
 */

#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "dma-bounce.h"
#include "dma-bounce-kunit.h"

#define AREA		SZ_64K
#define SECRET		0x5c

/**
 * struct bounce_test - what each test has
 * @fake:	the IOMMU and its device
 * @dev:	the device
 * @pool:	the pool of its domain
 * @area:	memory that is mapped
 * @expect:	what it should hold
 * @seed:	of what the area is filled with
 */
struct bounce_test {
	struct fake_iommu	*fake;
	struct device		*dev;
	struct dma_bounce_pool	*pool;
	u8			*area;
	u8			*expect;
	u8			seed;
};

static int bounce_test_init(struct kunit *test)
{
	struct bounce_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, t);
	t->fake = fake_iommu_create();
	KUNIT_ASSERT_NOT_NULL(test, t->fake);
	test->priv = t;
	t->dev = t->fake->dev;
	t->pool = t->fake->domain.bounce;
	t->dev->iommu->bounce->choice = DMA_BOUNCE_SWITCH_ON;
	t->area = (u8 *)__get_free_pages(GFP_KERNEL, get_order(AREA));
	t->expect = kunit_kmalloc(test, AREA, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, t->area);
	KUNIT_ASSERT_NOT_NULL(test, t->expect);
	return 0;
}

static void bounce_test_exit(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	if (!t)
		return;
	fake_iommu_destroy(t->fake);
	free_pages((unsigned long)t->area, get_order(AREA));
}

static void fill(struct bounce_test *t)
{
	unsigned int i;

	t->seed += 101;
	for (i = 0; i < AREA; i++)
		t->area[i] = t->seed + i * 3 + (i >> 8);
	memcpy(t->expect, t->area, AREA);
}

static void expect_area(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	KUNIT_EXPECT_MEMEQ(test, t->area, t->expect, AREA);
}

static dma_addr_t map(struct kunit *test, unsigned int offset, size_t len,
		      enum dma_data_direction dir, unsigned long attrs)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr = dma_map_single_attrs(t->dev, t->area + offset, len, dir, attrs);

	KUNIT_ASSERT_FALSE(test, dma_mapping_error(t->dev, addr));
	return addr;
}

/* The first mappings make the pool, and each size its first chunk. */
static void warm(struct kunit *test, size_t len, enum dma_data_direction dir)
{
	struct bounce_test *t = test->priv;
	unsigned int i;
	dma_addr_t addr;
	bool bounced;

	for (i = 0; i < 100; i++) {
		addr = map(test, 0, len, dir, 0);
		bounced = dma_bounce_owns(t->pool, addr);
		dma_unmap_single_attrs(t->dev, addr, len, dir, DMA_ATTR_SKIP_CPU_SYNC);
		if (bounced)
			return;
		msleep(20);
	}
	KUNIT_FAIL_AND_ABORT(test, "%zu bytes do not get bounced", len);
}

static dma_addr_t map_bounced(struct kunit *test, unsigned int offset, size_t len,
			      enum dma_data_direction dir, unsigned long attrs)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	warm(test, len, dir);
	addr = map(test, offset, len, dir, attrs);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, addr));
	return addr;
}

static u64 stat(struct dma_bounce_pool *pool, enum dma_bounce_stat which)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += per_cpu_ptr(pool->stats, cpu)->count[which];
	return sum;
}

static unsigned int chunks(struct dma_bounce_pool *pool)
{
	unsigned int n;

	mutex_lock(&pool->slots.mutex);
	n = pool->nchunks;
	mutex_unlock(&pool->slots.mutex);
	return n;
}

static bool chunks_become(struct dma_bounce_pool *pool, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < 300 && chunks(pool) != n; i++)
		msleep(20);
	return chunks(pool) == n;
}

/* The allocator by itself */

static void no_drain(struct dma_bounce_slots *slots)
{
}

static void allocator_test(struct kunit *test)
{
	struct dma_bounce_slots *slots = kunit_kzalloc(test, sizeof(*slots), GFP_KERNEL);
	u8 *memory = kunit_kzalloc(test, SZ_1M, GFP_KERNEL);
	struct dma_bounce_slot *slot[16], *extra;
	struct dma_bounce_chunk *chunk;
	unsigned int i;

	KUNIT_ASSERT_NOT_NULL(test, slots);
	KUNIT_ASSERT_NOT_NULL(test, memory);
	dma_bounce_slots_init(slots, no_drain);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_open(slots, SZ_4K, SZ_4M, 20), -EINVAL);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_open(slots, SZ_1G, SZ_4M, 12), -EINVAL);
	KUNIT_ASSERT_EQ(test, dma_bounce_slots_open(slots, SZ_1G, SZ_4M, 20), 0);
	chunk = dma_bounce_chunk_alloc(DMA_BOUNCE_WRITE, 4, SZ_1M);
	KUNIT_ASSERT_NOT_NULL(test, chunk);
	dma_bounce_chunk_publish(slots, chunk, memory, SZ_1G + SZ_1M, SZ_1M);

	rcu_read_lock();
	KUNIT_EXPECT_NULL(test, dma_bounce_slots_get(slots, DMA_BOUNCE_READ, 4));
	KUNIT_EXPECT_NULL(test, dma_bounce_slots_get(slots, DMA_BOUNCE_WRITE, 3));
	for (i = 0; i < 16; i++) {
		slot[i] = dma_bounce_slots_get(slots, DMA_BOUNCE_WRITE, 4);
		KUNIT_EXPECT_NOT_NULL(test, slot[i]);
		if (!slot[i])
			goto out_unlock;
		KUNIT_EXPECT_TRUE(test, IS_ALIGNED(dma_bounce_slot_iova(slot[i]), SZ_64K));
		KUNIT_EXPECT_NULL(test, dma_bounce_slots_find(slots,
							      dma_bounce_slot_iova(slot[i])));
		slot[i]->len = 1;
		KUNIT_EXPECT_PTR_EQ(test, dma_bounce_slots_find(slots,
								dma_bounce_slot_iova(slot[i]) +
								SZ_64K - 1), slot[i]);
	}
	extra = dma_bounce_slots_get(slots, DMA_BOUNCE_WRITE, 4);
	KUNIT_EXPECT_NULL(test, extra);
	/* What was put back last is handed out first. */
	dma_bounce_slots_put(slots, slot[3]);
	dma_bounce_slots_put(slots, slot[7]);
	extra = dma_bounce_slots_get(slots, DMA_BOUNCE_WRITE, 4);
	KUNIT_EXPECT_TRUE(test, extra == slot[7] || extra == slot[3]);
	dma_bounce_slots_put(slots, extra);
out_unlock:
	rcu_read_unlock();
	KUNIT_EXPECT_FALSE(test, dma_bounce_chunk_withdraw(slots, chunk, 0));
	dma_bounce_chunk_retire(slots, chunk, DMA_BOUNCE_DRAINING);
	dma_bounce_slots_flush(slots, true);
	KUNIT_EXPECT_EQ(test, dma_bounce_chunk_used(slots, chunk), 14);
	rcu_read_lock();
	KUNIT_EXPECT_NULL(test, dma_bounce_slots_get(slots, DMA_BOUNCE_WRITE, 4));
	rcu_read_unlock();
	for (i = 0; i < 16; i++)
		if (slot[i]->len)
			dma_bounce_slots_put(slots, slot[i]);
	KUNIT_EXPECT_EQ(test, dma_bounce_chunk_used(slots, chunk), 0);
	mutex_lock(&slots->mutex);
	dma_bounce_chunk_remove(slots, chunk);
	mutex_unlock(&slots->mutex);
	dma_bounce_slots_close(slots);
}

/* What the device sees, and what comes back */

static void to_device_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *seen = kunit_kmalloc(test, 1000, GFP_KERNEL);
	dma_addr_t addr;

	fill(t);
	addr = map_bounced(test, 123, 1000, DMA_TO_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr, seen, 1000));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 123, 1000);
	KUNIT_EXPECT_FALSE(test, fake_device_write(t->fake, addr, "x", 1));
	dma_unmap_single(t->dev, addr, 1000, DMA_TO_DEVICE);
	expect_area(test);
}

/* Bytes that the device does not write come back as they were, not as an earlier user's. */
static void partial_write_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *secret = kunit_kmalloc(test, 3000, GFP_KERNEL), seen;
	dma_addr_t addr;

	KUNIT_ASSERT_NOT_NULL(test, secret);
	fill(t);
	memset(secret, SECRET, 3000);
	addr = map_bounced(test, 8192, 3000, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, secret, 3000));
	memset(t->expect + 8192, SECRET, 3000);
	dma_unmap_single(t->dev, addr, 3000, DMA_FROM_DEVICE);
	expect_area(test);

	fill(t);
	addr = map(test, 200, 3000, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 500, secret, 100));
	/* The device must not see what was there before. */
	KUNIT_EXPECT_FALSE(test, fake_device_read(t->fake, addr, &seen, 1));
	expect_area(test);
	memset(t->expect + 700, SECRET, 100);
	dma_unmap_single(t->dev, addr, 3000, DMA_FROM_DEVICE);
	expect_area(test);
}

/* Without copy-in: nothing comes back, or all if unmap vouches for it. */
static void no_copy_in_test(struct kunit *test)
{
	const unsigned long attrs = DMA_ATTR_BOUNCE_NO_COPY_IN;
	struct bounce_test *t = test->priv;
	u8 *bytes = kunit_kmalloc(test, 2048, GFP_KERNEL), seen[256];
	dma_addr_t addr;

	KUNIT_ASSERT_NOT_NULL(test, bytes);
	fill(t);
	memset(bytes, SECRET, 2048);
	addr = map_bounced(test, 0, 2048, DMA_FROM_DEVICE, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 64));
	dma_unmap_single(t->dev, addr, 2048, DMA_FROM_DEVICE);
	expect_area(test);

	addr = map(test, 4096, 2048, DMA_FROM_DEVICE, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 2048));
	memset(t->expect + 4096, SECRET, 2048);
	dma_unmap_single_attrs(t->dev, addr, 2048, DMA_FROM_DEVICE, DMA_ATTR_BOUNCE_ALL_WRITTEN);
	expect_area(test);

	/* The attribute means nothing where the device reads. */
	addr = map_bounced(test, 300, 256, DMA_BIDIRECTIONAL, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr, seen, 256));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 300, 256);
	dma_unmap_single(t->dev, addr, 256, DMA_BIDIRECTIONAL);
	expect_area(test);
}

static void sync_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 bytes[128], seen[64];
	dma_addr_t addr;

	fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = map_bounced(test, 1000, 2000, DMA_BIDIRECTIONAL, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 64, bytes, 128));
	dma_sync_single_range_for_cpu(t->dev, addr, 64, 64, DMA_BIDIRECTIONAL);
	memset(t->expect + 1064, SECRET, 64);
	expect_area(test);
	dma_sync_single_for_cpu(t->dev, addr + 128, 64, DMA_BIDIRECTIONAL);
	memset(t->expect + 1128, SECRET, 64);
	expect_area(test);

	/* The CPU changes two places and gives one of them to the device. */
	memset(t->area + 1500, 0x11, 32);
	memset(t->area + 1600, 0x22, 32);
	dma_sync_single_range_for_device(t->dev, addr, 500, 32, DMA_BIDIRECTIONAL);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 500, seen, 32));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 1500, 32);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 600, seen, 32));
	KUNIT_EXPECT_MEMEQ(test, seen, t->expect + 1600, 32);
	dma_unmap_single(t->dev, addr, 2000, DMA_BIDIRECTIONAL);
	memset(t->expect + 1500, 0x11, 32);
	expect_area(test);
	KUNIT_EXPECT_EQ(test, stat(t->pool, DMA_BOUNCE_SYNCS), 3);
}

/* A coherent device elides sync calls until it bounces for the first time, and then no more. */
static void sync_elision_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	if (IS_ENABLED(CONFIG_DMA_API_DEBUG))
		kunit_skip(test, "DMA API debugging never elides them");
	t->dev->iommu->bounce->choice = DMA_BOUNCE_SWITCH_OFF;
	addr = map(test, 0, 512, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_dev_need_sync(t->dev));
	dma_sync_single_for_cpu(t->dev, addr, 512, DMA_FROM_DEVICE);
	dma_unmap_single(t->dev, addr, 512, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, stat(t->pool, DMA_BOUNCE_SYNCS_PLAIN), 0);
	KUNIT_EXPECT_EQ(test, stat(t->pool, DMA_BOUNCE_ELISION_LOST), 0);

	t->dev->iommu->bounce->choice = DMA_BOUNCE_SWITCH_ON;
	addr = map_bounced(test, 0, 512, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, dma_dev_need_sync(t->dev));
	dma_unmap_single(t->dev, addr, 512, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, stat(t->pool, DMA_BOUNCE_ELISION_LOST), 1);
}

/* The low bits of the address that the device needs are kept. */
static void min_align_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;
	u8 seen[100];

	fill(t);
	dma_set_min_align_mask(t->dev, SZ_4K - 1);
	/* The offset counts for the size of the slot. */
	warm(test, SZ_16K, DMA_TO_DEVICE);
	addr = map(test, 4000, 5000, DMA_TO_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, addr));
	KUNIT_EXPECT_EQ(test, offset_in_page(addr), 4000);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 4900, seen, 100));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 8900, 100);
	dma_unmap_single(t->dev, addr, 5000, DMA_TO_DEVICE);
	dma_set_min_align_mask(t->dev, 0);
	expect_area(test);
}

/* Lists */

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

/* Whether the flat bytes are those of the pieces of @area */
static bool list_is(u8 *area, u8 *flat)
{
	unsigned int i;

	for (i = 0; i < PIECES; flat += pieces[i++].len)
		if (memcmp(area + pieces[i].offset, flat, pieces[i].len))
			return false;
	return true;
}

static void list_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *flat = kunit_kzalloc(test, LIST_LEN, GFP_KERNEL);
	struct scatterlist sgl[PIECES];
	unsigned int i;

	fill(t);
	warm(test, LIST_LEN, DMA_BIDIRECTIONAL);
	init_list(t, sgl);
	KUNIT_ASSERT_EQ(test, dma_map_sg(t->dev, sgl, PIECES, DMA_BIDIRECTIONAL), 1);
	KUNIT_EXPECT_EQ(test, sg_dma_len(sgl), LIST_LEN);
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, sg_dma_address(sgl)));
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	KUNIT_EXPECT_TRUE(test, list_is(t->area, flat));

	/* Back by a sync of the first two pieces, then by unmapping all */
	memset(flat, SECRET, LIST_LEN);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, sg_dma_address(sgl), flat, LIST_LEN));
	dma_sync_sg_for_cpu(t->dev, sgl, 2, DMA_BIDIRECTIONAL);
	for (i = 0; i < PIECES; i++) {
		if (i == 2)
			expect_area(test);
		memset(t->expect + pieces[i].offset, SECRET, pieces[i].len);
	}
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_BIDIRECTIONAL);
	expect_area(test);
}

/* One slot, but as many segments as the device needs */
static void max_segment_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	unsigned int max = dma_get_max_seg_size(t->dev), i, sum = 0, n;
	struct scatterlist sgl[PIECES], *s;

	fill(t);
	warm(test, LIST_LEN, DMA_TO_DEVICE);
	init_list(t, sgl);
	dma_set_max_seg_size(t->dev, 1024);
	n = dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	/* 700; 1024; 512 and 333 */
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
	expect_area(test);
}

/* A list whose pieces do not fit behind each other is mapped the ordinary way. */
static void list_layout_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u64 before = stat(t->pool, DMA_BOUNCE_FB_LAYOUT);
	struct scatterlist sgl[PIECES];
	int n;

	fill(t);
	warm(test, SZ_8K, DMA_TO_DEVICE);
	dma_set_min_align_mask(t->dev, SZ_4K - 1);
	init_list(t, sgl);
	KUNIT_EXPECT_EQ(test, dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE), 1);
	KUNIT_EXPECT_EQ(test, offset_in_page(sg_dma_address(sgl)), 4096 - 700);
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	sgl[PIECES - 1].offset++;
	n = dma_map_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	KUNIT_EXPECT_GT(test, n, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, sg_dma_address(sgl)));
	KUNIT_EXPECT_EQ(test, stat(t->pool, DMA_BOUNCE_FB_LAYOUT), before + 1);
	dma_unmap_sg(t->dev, sgl, PIECES, DMA_TO_DEVICE);
	dma_set_min_align_mask(t->dev, 0);
	expect_area(test);
}

/* What does not bounce */

static void not_bounced_test(struct kunit *test)
{
	static const unsigned long attrs[] = {
		DMA_ATTR_SKIP_CPU_SYNC, DMA_ATTR_PRIVILEGED, DMA_BOUNCE_ATTR_LASTING,
	};
	struct bounce_test *t = test->priv;
	dma_addr_t addr;
	unsigned int i;

	warm(test, 4096, DMA_FROM_DEVICE);
	for (i = 0; i < ARRAY_SIZE(attrs); i++) {
		addr = map(test, 0, 4096, DMA_FROM_DEVICE, attrs[i]);
		KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
		dma_unmap_single_attrs(t->dev, addr, 4096, DMA_FROM_DEVICE, attrs[i]);
	}
	KUNIT_EXPECT_EQ(test, stat(t->pool, DMA_BOUNCE_FB_ATTRS), ARRAY_SIZE(attrs));

	t->dev->iommu->bounce->threshold = 2048;
	addr = map(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	t->dev->iommu->bounce->threshold = 0;
	t->dev->iommu->bounce->choice = DMA_BOUNCE_SWITCH_AUTO;
	addr = map(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
}

/* The size of the pool */

/* No mapping fails because the pool is full, and nothing is mixed up. */
static void exhaustion_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr[16];
	unsigned int i, bounced = 0;
	u8 byte;

	fake_set_budget(t->fake, FAKE_CHUNK);
	fill(t);
	warm(test, SZ_64K, DMA_BIDIRECTIONAL);
	for (i = 0; i < 16; i++) {
		addr[i] = map(test, 0, SZ_64K, DMA_BIDIRECTIONAL, 0);
		bounced += dma_bounce_owns(t->pool, addr[i]);
	}
	KUNIT_EXPECT_EQ(test, bounced, FAKE_CHUNK / SZ_64K);
	KUNIT_EXPECT_GE(test, stat(t->pool, DMA_BOUNCE_FB_FULL), 16 - bounced);
	for (i = 0; i < 16; i++) {
		KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr[i] + 77, &byte, 1));
		KUNIT_EXPECT_EQ(test, byte, t->area[77]);
	}
	for (i = 0; i < 16; i++)
		dma_unmap_single(t->dev, addr[i], SZ_64K, DMA_BIDIRECTIONAL);
	expect_area(test);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
}

/* A lowered budget: idle chunks go at once, one in use when its last mapping ends. */
static void budget_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 bytes[512];
	dma_addr_t addr;

	fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	warm(test, 4096, DMA_TO_DEVICE);
	warm(test, 8192, DMA_BIDIRECTIONAL);
	addr = map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_ASSERT_EQ(test, chunks(t->pool), 3);
	fake_set_budget(t->fake, FAKE_CHUNK);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 1));
	fake_set_budget(t->fake, 0);
	msleep(100);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	/* Nobody gets the other slots meanwhile. */
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 8, bytes, sizeof(bytes)));
	dma_unmap_single(t->dev, map(test, 0, 4096, DMA_FROM_DEVICE, 0), 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	memset(t->expect + 8, SECRET, sizeof(bytes));
	expect_area(test);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
	KUNIT_EXPECT_EQ(test, t->pool->drained, 1);
	/* Raised again, it is used again. */
	fake_set_budget(t->fake, SZ_4M);
	addr = map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	expect_area(test);
}

/* Chunks that nobody uses are given back, one that somebody uses is not. */
static void idle_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	t->pool->idle_ms = 20;
	warm(test, 8192, DMA_TO_DEVICE);
	addr = map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 1));
	msleep(300);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
	KUNIT_EXPECT_GE(test, t->pool->shrunk, 2);
}

/* The domain loses its memory while something is mapped: that is not touched any more. */
static void orphan_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr, other;
	u8 byte = SECRET;

	fill(t);
	addr = map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, &byte, 1));
	iommu_dma_bounce_stop(&t->fake->domain);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 0);
	KUNIT_EXPECT_FALSE(test, fake_device_write(t->fake, addr, &byte, 1));
	dma_sync_single_for_cpu(t->dev, addr, 4096, DMA_FROM_DEVICE);
	iommu_dma_bounce_start(&t->fake->domain);
	/* New memory goes elsewhere as long as the orphan has its address. */
	other = map_bounced(test, 8192, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_NE(test, addr / FAKE_CHUNK, other / FAKE_CHUNK);
	dma_unmap_single(t->dev, other, 4096, DMA_FROM_DEVICE);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	expect_area(test);
	KUNIT_EXPECT_EQ(test, t->pool->orphaned, 1);
}

/* Buffers of their own, as devices get that are not trusted */
static void single_use_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	phys_addr_t phys = virt_to_phys(t->area) + 4000;
	u8 bytes[200], *page;
	dma_addr_t addr;
	unsigned int i;

	fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = dma_bounce_single_map(t->pool, DMA_BIT_MASK(32), phys, 200, DMA_BIDIRECTIONAL, 0);
	KUNIT_ASSERT_NE(test, addr, DMA_MAPPING_ERROR);
	KUNIT_EXPECT_LE(test, addr, DMA_BIT_MASK(32));
	KUNIT_EXPECT_EQ(test, offset_in_page(addr), 4000);
	/* Nothing but the bytes mapped is there. */
	page = fake_device_page(t->fake, addr >> PAGE_SHIFT, IOMMU_READ);
	KUNIT_ASSERT_NOT_NULL(test, page);
	for (i = 0; i < 4000; i++)
		KUNIT_ASSERT_EQ(test, page[i], 0);
	KUNIT_EXPECT_MEMEQ(test, page + 4000, t->area + 4000, 96);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 50, bytes, 100));
	KUNIT_EXPECT_TRUE(test, dma_bounce_single_sync(t->pool, addr + 100, 50, false));
	memset(t->expect + 4100, SECRET, 50);
	expect_area(test);
	KUNIT_EXPECT_FALSE(test, dma_bounce_single_sync(t->pool, addr - SZ_64K, 1, false));
	KUNIT_EXPECT_TRUE(test, dma_bounce_single_unmap(t->pool, addr, 0));
	memset(t->expect + 4050, SECRET, 100);
	expect_area(test);
	KUNIT_EXPECT_FALSE(test, dma_bounce_single_unmap(t->pool, addr, 0));
	KUNIT_EXPECT_NULL(test, fake_device_page(t->fake, addr >> PAGE_SHIFT, IOMMU_READ));
}

/*
 * A device that goes where it should not: it reads and writes whatever the IOMMU lets it,
 * everywhere in the range of the pool and outside.
 */
static void attack_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	unsigned long pfn, readable = 0, writable = 0;
	dma_addr_t in, out;
	void *entry, *page;

	/* Around what is mapped are bytes that the device was not given. */
	memset(t->area, SECRET, AREA);
	memset(t->area + 100, 1, 50);
	memset(t->area + 20000, 2, 60);
	warm(test, 60, DMA_FROM_DEVICE);
	/* Warming up would give the device what is at the start. */
	memset(t->area, 1, 60);
	out = map_bounced(test, 100, 50, DMA_TO_DEVICE, 0);
	in = map(test, 20000, 60, DMA_FROM_DEVICE, 0);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, in));
	memcpy(t->expect, t->area, AREA);
	xa_for_each(&t->fake->table, pfn, entry) {
		page = fake_device_page(t->fake, pfn, IOMMU_READ);
		if (page) {
			readable++;
			KUNIT_EXPECT_NULL(test, memchr(page, SECRET, PAGE_SIZE));
		}
		page = fake_device_page(t->fake, pfn, IOMMU_WRITE);
		if (page) {
			writable++;
			memset(page, 0xff, PAGE_SIZE);
		}
	}
	KUNIT_EXPECT_EQ(test, readable, FAKE_CHUNK / PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, writable, FAKE_CHUNK / PAGE_SIZE);
	expect_area(test);
	dma_unmap_single(t->dev, out, 50, DMA_TO_DEVICE);
	expect_area(test);
	dma_unmap_single(t->dev, in, 60, DMA_FROM_DEVICE);
	memset(t->expect + 20000, 0xff, 60);
	expect_area(test);
	/* What it wrote ends up in no later mapping. */
	in = map(test, 30000, 60, DMA_FROM_DEVICE, 0);
	dma_unmap_single(t->dev, in, 60, DMA_FROM_DEVICE);
	expect_area(test);
}

static void calibrate_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	size_t threshold;

	warm(test, 4096, DMA_TO_DEVICE);
	threshold = dma_bounce_calibrate(t->pool);
	KUNIT_EXPECT_GE(test, threshold, PAGE_SIZE);
	KUNIT_EXPECT_LE(test, threshold, DMA_BOUNCE_MAX_SLOT);
	KUNIT_EXPECT_GT(test, t->fake->maps, 0);
}

static struct kunit_case bounce_cases[] = {
	KUNIT_CASE(allocator_test),
	KUNIT_CASE(to_device_test),
	KUNIT_CASE(partial_write_test),
	KUNIT_CASE(no_copy_in_test),
	KUNIT_CASE(sync_test),
	KUNIT_CASE(sync_elision_test),
	KUNIT_CASE(min_align_test),
	KUNIT_CASE(list_test),
	KUNIT_CASE(max_segment_test),
	KUNIT_CASE(list_layout_test),
	KUNIT_CASE(not_bounced_test),
	KUNIT_CASE(exhaustion_test),
	KUNIT_CASE(budget_test),
	KUNIT_CASE(idle_test),
	KUNIT_CASE(orphan_test),
	KUNIT_CASE(single_use_test),
	KUNIT_CASE(attack_test),
	KUNIT_CASE(calibrate_test),
	{ }
};

static struct kunit_suite bounce_suite = {
	.name		= "dma-bounce",
	.init		= bounce_test_init,
	.exit		= bounce_test_exit,
	.test_cases	= bounce_cases,
};

kunit_test_suite(bounce_suite);
