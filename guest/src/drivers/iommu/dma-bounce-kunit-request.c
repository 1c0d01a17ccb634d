// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: block requests that bounce as a whole, and requests that are declined
 */

#include <kunit/test.h>
#include <linux/bio.h>
#include <linux/blk-mq-dma.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-device.h"
#include "dma-bounce-kunit.h"

/* Pieces of the area. The second piece starts at the page offset at which the first piece ends. */
static const struct { unsigned int offset, len; } pieces[] = {
	{ 1000, 700 }, { 3 * 4096 + 1700, 3396 },
};

#define PIECES		ARRAY_SIZE(pieces)
#define REQUEST_LEN	(700 + 3396)
/* A request that contains the whole area this many times is larger than the largest slot. */
#define AREAS		(DMA_BOUNCE_MAX_SLOT / AREA + 1)

/**
 * struct test_request - a request that belongs to no queue
 * @req:	the request
 * @bio:	the only bio of the request
 * @vecs:	data of the request
 * @state:	state that mapping sets
 * @iter:	iterator that mapping sets
 */
struct test_request {
	struct request		req;
	struct bio		bio;
	struct bio_vec		vecs[AREAS];
	struct dma_iova_state	state;
	struct blk_dma_iter	iter;
};

static void start_request(struct test_request *r, enum req_op op)
{
	memset(r, 0, sizeof(*r));
	bio_init(&r->bio, NULL, r->vecs, ARRAY_SIZE(r->vecs), op);
	r->req.bio = &r->bio;
	r->req.cmd_flags = op;
}

static void add_piece(struct bounce_test *t, struct test_request *r, unsigned int offset,
		      unsigned int len)
{
	__bio_add_page(&r->bio, virt_to_page(t->area + offset), len,
		       offset_in_page(t->area + offset));
	r->req.__data_len += len;
}

static void init_request(struct bounce_test *t, struct test_request *r, enum req_op op)
{
	unsigned int i;

	start_request(r, op);
	for (i = 0; i < PIECES; i++)
		add_piece(t, r, pieces[i].offset, pieces[i].len);
}

/* Makes a read request that can bounce. */
static struct test_request *make_request(struct kunit *test)
{
	struct test_request *r = kunit_kzalloc(test, sizeof(*r), GFP_KERNEL);
	struct bounce_test *t = test->priv;

	KUNIT_ASSERT_NOT_NULL(test, r);
	bounce_kunit_fill(t);
	init_request(t, r, REQ_OP_READ);
	return r;
}

static bool map(struct kunit *test, struct test_request *r, unsigned long attrs)
{
	struct bounce_test *t = test->priv;

	memset(&r->state, 0, sizeof(r->state));
	memset(&r->iter, 0, sizeof(r->iter));
	return dma_bounce_map_request(&r->req, t->dev, &r->state, &r->iter, attrs);
}

static void unmap(struct kunit *test, struct test_request *r)
{
	struct bounce_test *t = test->priv;

	dma_bounce_unmap_request(&r->req, t->dev, &r->state, 0);
}

/* Counts the slots in use, without slots that CPUs keep. */
static unsigned int slots_used(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned int used = 0;
	unsigned long place;

	mutex_lock(&pool->slots.mutex);
	if (pool->slots.len)
		dma_bounce_slots_flush(&pool->slots, true);
	for (place = 0; place < dma_bounce_slots_places(&pool->slots); place++) {
		chunk = dma_bounce_slots_chunk(&pool->slots, place);
		if (chunk)
			used += dma_bounce_chunk_used(&pool->slots, chunk);
	}
	mutex_unlock(&pool->slots.mutex);
	return used;
}

/* Expects that the request is declined, which changes nothing and takes no slot. */
static void expect_declined(struct kunit *test, struct test_request *r, unsigned long attrs)
{
	struct bounce_test *t = test->priv;
	bool mapped = map(test, r, attrs);

	KUNIT_EXPECT_FALSE(test, mapped);
	KUNIT_EXPECT_EQ(test, r->state.__size, 0);
	KUNIT_EXPECT_EQ(test, r->iter.len, 0);
	if (mapped)
		unmap(test, r);
	KUNIT_EXPECT_EQ(test, slots_used(t->pool), 0);
}

/* Expects that the request is declined for this reason. */
static void expect_declined_as(struct kunit *test, struct test_request *r, unsigned long attrs,
			       enum dma_bounce_stat reason)
{
	struct bounce_test *t = test->priv;
	u64 before = dma_bounce_pool_stat(t->pool, reason);

	expect_declined(test, r, attrs);
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, reason), before + 1);
}

/* Expects that the request bounces. So only the reason under test prevented it before. */
static void expect_mapped(struct kunit *test, struct test_request *r)
{
	bool mapped = map(test, r, 0);

	KUNIT_EXPECT_TRUE(test, mapped);
	if (mapped)
		unmap(test, r);
}

/* The device sees one range, and its writes reach all pieces. */
static void request_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *flat = kunit_kmalloc(test, REQUEST_LEN, GFP_KERNEL);
	struct test_request *r = make_request(test);
	unsigned int i;

	KUNIT_ASSERT_NOT_NULL(test, flat);
	bounce_kunit_warm(test, REQUEST_LEN, DMA_TO_DEVICE);
	bounce_kunit_warm(test, REQUEST_LEN, DMA_FROM_DEVICE);
	KUNIT_ASSERT_TRUE(test, map(test, r, 0));
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, r->iter.addr));
	KUNIT_EXPECT_EQ(test, r->iter.addr, r->state.addr);
	KUNIT_EXPECT_EQ(test, r->iter.len, REQUEST_LEN);
	KUNIT_EXPECT_EQ(test, dma_iova_size(&r->state), REQUEST_LEN);
	KUNIT_EXPECT_EQ(test, slots_used(t->pool), 1);
	memset(flat, SECRET, REQUEST_LEN);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, r->iter.addr, flat, REQUEST_LEN));
	bounce_kunit_expect_area(test);
	unmap(test, r);
	for (i = 0; i < PIECES; i++)
		memset(t->expect + pieces[i].offset, SECRET, pieces[i].len);
	bounce_kunit_expect_area(test);

	bounce_kunit_fill(t);
	init_request(t, r, REQ_OP_WRITE);
	KUNIT_ASSERT_TRUE(test, map(test, r, 0));
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, r->iter.addr, flat, REQUEST_LEN));
	KUNIT_EXPECT_MEMEQ(test, flat, t->area + pieces[0].offset, pieces[0].len);
	KUNIT_EXPECT_MEMEQ(test, flat + pieces[0].len, t->area + pieces[1].offset, pieces[1].len);
	unmap(test, r);
	KUNIT_EXPECT_EQ(test, slots_used(t->pool), 0);
	bounce_kunit_expect_area(test);
}

/* A request is declined if the pool is not ready, has no free slot, or cannot serve the device. */
static void request_pool_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct test_request *r = make_request(test);

	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_STARTING);
	bounce_kunit_warm(test, REQUEST_LEN, DMA_FROM_DEVICE);
	expect_mapped(test, r);
	/* The pool has no chunk yet that the device may read. */
	r->req.cmd_flags = REQ_OP_WRITE;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_FULL);
	r->req.cmd_flags = REQ_OP_READ;

	KUNIT_ASSERT_EQ(test, dma_set_mask(t->dev, DMA_BIT_MASK(28)), 0);
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_MASK);
	KUNIT_ASSERT_EQ(test, dma_set_mask(t->dev, DMA_BIT_MASK(64)), 0);
	t->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_OFF;
	expect_declined(test, r, 0);
	t->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_ON;
	t->dev->iommu->attach_deferred = 1;
	expect_declined(test, r, 0);
	t->dev->iommu->attach_deferred = 0;
	dev_clear_dma_iommu(t->dev);
	expect_declined(test, r, 0);
	dev_set_dma_iommu(t->dev);
	expect_mapped(test, r);
	bounce_kunit_expect_area(test);
}

/* A request is declined because of the mapping's attributes. */
static void request_attrs_test(struct kunit *test)
{
	static const unsigned long attrs[] = {
		DMA_ATTR_SKIP_CPU_SYNC, DMA_ATTR_PRIVILEGED, DMA_ATTR_REQUIRE_COHERENT,
		DMA_ATTR_MMIO,
	};
	struct bounce_test *t = test->priv;
	struct test_request *r = make_request(test);
	unsigned int i;

	bounce_kunit_warm(test, REQUEST_LEN, DMA_FROM_DEVICE);
	for (i = 0; i < ARRAY_SIZE(attrs); i++)
		expect_declined_as(test, r, attrs[i], DMA_BOUNCE_FB_ATTRS);
	expect_mapped(test, r);
	KUNIT_EXPECT_EQ(test, slots_used(t->pool), 0);
	bounce_kunit_expect_area(test);
}

/*
 * A request is declined if it is larger than the threshold, the segment limit, or the largest slot.
 */
static void request_size_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	unsigned int max = dma_get_max_seg_size(t->dev), i;
	struct test_request *r = make_request(test);

	bounce_kunit_warm(test, REQUEST_LEN, DMA_FROM_DEVICE);
	t->dev->iommu->bounce.threshold.write = REQUEST_LEN - 1;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_SIZE);
	t->dev->iommu->bounce.threshold.write = REQUEST_LEN;
	t->dev->iommu->bounce.threshold.read = REQUEST_LEN - 1;
	expect_mapped(test, r);
	r->req.cmd_flags = REQ_OP_WRITE;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_SIZE);
	r->req.cmd_flags = REQ_OP_READ;
	dma_set_max_seg_size(t->dev, REQUEST_LEN - 1);
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_SIZE);
	dma_set_max_seg_size(t->dev, REQUEST_LEN);
	expect_mapped(test, r);

	t->dev->iommu->bounce.threshold.write = SZ_1M;
	dma_set_max_seg_size(t->dev, SZ_1M);
	start_request(r, REQ_OP_READ);
	for (i = 0; i < AREAS; i++)
		add_piece(t, r, 0, AREA);
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_SIZE);
	t->dev->iommu->bounce.threshold = (struct dma_bounce_thresholds) { };
	dma_set_max_seg_size(t->dev, max);
	bounce_kunit_expect_area(test);
}

/* A request is declined if its pieces cannot be packed, or if its bios do not contain the data. */
static void request_layout_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	unsigned long boundary = dma_get_seg_boundary(t->dev);
	struct test_request *r = make_request(test);

	bounce_kunit_warm(test, SZ_8K, DMA_FROM_DEVICE);
	dma_set_min_align_mask(t->dev, SZ_4K - 1);
	expect_mapped(test, r);
	r->vecs[1].bv_offset--;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_LAYOUT);
	r->vecs[1].bv_offset++;
	dma_set_min_align_mask(t->dev, 0);

	bounce_kunit_warm(test, REQUEST_LEN, DMA_FROM_DEVICE);
	dma_set_seg_boundary(t->dev, DMA_BOUNCE_MAX_SLOT / 2 - 1);
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_LAYOUT);
	dma_set_seg_boundary(t->dev, DMA_BOUNCE_MAX_SLOT - 1);
	expect_mapped(test, r);
	dma_set_seg_boundary(t->dev, boundary);

	/* The length of the bios differs from the length of the request. */
	r->req.__data_len--;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_LAYOUT);
	r->req.__data_len++;
	r->req.bio = NULL;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_LAYOUT);
	r->req.bio = &r->bio;
	/* The data is in the special payload. */
	r->req.special_vec = (struct bio_vec) { .bv_len = REQUEST_LEN };
	r->req.rq_flags |= RQF_SPECIAL_PAYLOAD;
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_LAYOUT);
	r->req.rq_flags &= ~RQF_SPECIAL_PAYLOAD;
	expect_mapped(test, r);
	KUNIT_EXPECT_EQ(test, slots_used(t->pool), 0);
	bounce_kunit_expect_area(test);
}

/* A request is declined if a piece is memory of another device, but not if it is a DAX page. */
static void request_memory_test(struct kunit *test)
{
#ifdef CONFIG_ZONE_DEVICE
	struct bounce_test *t = test->priv;
	struct test_request *r = make_request(test);
	struct page *page = virt_to_page(t->area + pieces[1].offset);
	struct dev_pagemap map = { .type = MEMORY_DEVICE_COHERENT }, *old_map;
	enum zone_type zone = page_zonenum(page);
	struct folio *folio = page_folio(page);

	bounce_kunit_warm(test, REQUEST_LEN, DMA_FROM_DEVICE);
	expect_mapped(test, r);
	old_map = folio->pgmap;
	folio->pgmap = &map;
	set_page_zone(page, ZONE_DEVICE);
	expect_declined_as(test, r, 0, DMA_BOUNCE_FB_MEMORY);
	map.type = MEMORY_DEVICE_FS_DAX;
	expect_mapped(test, r);
	set_page_zone(page, zone);
	folio->pgmap = old_map;
	expect_mapped(test, r);
	bounce_kunit_expect_area(test);
#else
	kunit_skip(test, "no memory of devices has pages here");
#endif
}

/* Maps a physical address that has no page. The kernels with this file map addresses, not pages. */
static void no_page_test(struct kunit *test)
{
	const phys_addr_t nowhere = BIT_ULL(45);
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	KUNIT_ASSERT_FALSE(test, pfn_valid(PHYS_PFN(nowhere)));
	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	/* Avoid the DMA API's debugging, which looks for the page. */
	addr = iommu_dma_map_phys(t->dev, nowhere, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_ASSERT_NE(test, addr, DMA_MAPPING_ERROR);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	iommu_dma_unmap_phys(t->dev, addr, 4096, DMA_FROM_DEVICE, 0);
}

static struct kunit_case bounce_request_cases[] = {
	KUNIT_CASE(request_test),
	KUNIT_CASE(request_pool_test),
	KUNIT_CASE(request_attrs_test),
	KUNIT_CASE(request_size_test),
	KUNIT_CASE(request_layout_test),
	KUNIT_CASE(request_memory_test),
	KUNIT_CASE(no_page_test),
	{ }
};

static struct kunit_suite bounce_request_suite = {
	.name		= "dma-bounce-request",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_request_cases,
};

kunit_test_suite(bounce_request_suite);
