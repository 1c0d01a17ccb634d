// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: NUMA node of bounce memory, and memory of other devices, which must
 * not be copied
 */

#include <kunit/test.h>
#include <linux/cpumask.h>
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/ioport.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/nodemask.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/shrinker.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-kunit.h"
#include "dma-bounce-map.h"
#include "dma-bounce-pages.h"
#include "dma-bounce-pool.h"
#include "dma-bounce-share.h"

static int node_of(void *va)
{
	return page_to_nid(is_vmalloc_addr(va) ? vmalloc_to_page(va) : virt_to_page(va));
}

/* Expects that a chunk's memory and structure are on a node. */
static void expect_chunk_on(struct kunit *test, struct dma_bounce_chunk *chunk, int node)
{
	unsigned int elsewhere = 0;
	size_t at;

	KUNIT_EXPECT_EQ(test, node_of(chunk), node);
	for (at = 0; at < chunk->size; at += PAGE_SIZE)
		elsewhere += node_of(chunk->va + at) != node;
	KUNIT_EXPECT_EQ(test, elsewhere, 0);
}

/* Makes a pool of the kernel's pages for the device's domain, with a chunk. */
static struct dma_bounce_pool *make_page_pool(struct kunit *test)
{
	static const struct dma_bounce_thresholds threshold = { .read = SZ_4K };
	struct bounce_test *t = test->priv;
	struct iommu_domain *domain = &t->fake->domain;
	struct dma_bounce_pool *pool;

	pool = dma_bounce_pool_create(domain, t->pool->iovad, &dma_bounce_page_ops, t->dev,
				      &threshold);
	KUNIT_ASSERT_NOT_NULL(test, pool);
	dma_bounce_share_add(pool);
	domain->bounce = pool;
	/* Request a chunk, as a mapping without a slot does, and run the pool's work directly. */
	pool->mask = DMA_BIT_MASK(32);
	atomic_inc(&pool->missed[DMA_BOUNCE_WRITE][0]);
	pool->work.func(&pool->work);
	return pool;
}

static void free_page_pool(struct kunit *test, struct dma_bounce_pool *pool)
{
	struct bounce_test *t = test->priv;

	dma_bounce_share_del(pool);
	dma_bounce_pool_destroy(pool);
	t->fake->domain.bounce = t->pool;
}

/* Moves the device to a node, and adds a chunk to a pool of the kernel's pages. */
static void add_chunk_on(struct kunit *test, int node)
{
	struct bounce_test *t = test->priv;
	struct dma_bounce_chunk *chunk;
	struct dma_bounce_pool *pool;
	unsigned long place = 0;

	set_dev_node(t->dev, node);
	pool = make_page_pool(test);
	mutex_lock(&pool->slots.mutex);
	chunk = dma_bounce_next_chunk(pool, &place);
	KUNIT_EXPECT_NOT_NULL(test, chunk);
	if (chunk)
		expect_chunk_on(test, chunk, node);
	mutex_unlock(&pool->slots.mutex);
	free_page_pool(test, pool);
}

/* If memory is short, a pool of the kernel's pages gives its idle chunks back at once. */
static void shrink_test(struct kunit *test)
{
	struct dma_bounce_pool *pool = make_page_pool(test);
	struct shrink_control sc = { .nr_to_scan = 1 };
	struct dma_bounce_slot *slot;

	KUNIT_EXPECT_EQ(test, pool->nchunks, 1);
	rcu_read_lock();
	slot = dma_bounce_slots_get(&pool->slots, DMA_BOUNCE_WRITE, 0, DMA_BOUNCE_SINGLE);
	rcu_read_unlock();
	KUNIT_EXPECT_NOT_NULL(test, slot);
	KUNIT_EXPECT_EQ(test, dma_bounce_pages_scan(NULL, &sc), SHRINK_STOP);
	KUNIT_EXPECT_EQ(test, pool->nchunks, 1);
	if (slot)
		dma_bounce_slots_put(&pool->slots, slot);
	KUNIT_EXPECT_EQ(test, dma_bounce_pages_scan(NULL, &sc), DMA_BOUNCE_PAGE_CHUNK / PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, pool->nchunks, 0);
	KUNIT_EXPECT_EQ(test, dma_bounce_pages_scan(NULL, &sc), SHRINK_STOP);
	free_page_pool(test, pool);
}

/* Chunks of the kernel's own pages come from the node of the device, whichever CPU adds them. */
static void node_test(struct kunit *test)
{
	int node;

	if (num_node_state(N_NORMAL_MEMORY) < 2)
		kunit_skip(test, "this machine has one node");
	/*
	 * Stay on one CPU. If an allocation requested no node, it would use this CPU's node, and
	 * the test would fail for the other nodes.
	 */
	set_cpus_allowed_ptr(current, cpumask_of(raw_smp_processor_id()));
	for_each_node_state(node, N_NORMAL_MEMORY)
		add_chunk_on(test, node);
}

#ifdef CONFIG_ZONE_DEVICE
/* Makes pages for memory of another device, at unused addresses, and calls @use with one page. */
static void use_device_page(struct kunit *test, enum memory_type type,
			    void (*use)(struct kunit *test, struct page *page))
{
	struct dev_pagemap *map = kunit_kzalloc(test, sizeof(*map), GFP_KERNEL);
	struct resource res = { .name = "dma-bounce-kunit", .flags = IORESOURCE_MEM };
	void *va;

	KUNIT_ASSERT_NOT_NULL(test, map);
	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	KUNIT_ASSERT_EQ(test, allocate_resource(&iomem_resource, &res, SZ_128M, SZ_4G,
						DMA_BIT_MASK(36), SZ_128M, NULL, NULL), 0);
	map->type = type;
	map->range.start = res.start;
	map->range.end = res.end;
	map->nr_range = 1;
	va = memremap_pages(map, NUMA_NO_NODE);
	KUNIT_EXPECT_FALSE(test, IS_ERR(va));
	if (!IS_ERR(va)) {
		use(test, virt_to_page(va));
		memunmap_pages(map);
	}
	release_resource(&res);
}

/* Maps a page of memory with DAX, which is copied like other pages. */
static void map_dax_page(struct kunit *test, struct page *page)
{
	/* There is no memory at the address of the page, so nothing may be copied. */
	const unsigned long attrs = DMA_ATTR_BOUNCE_NO_COPY_IN;
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[1];
	dma_addr_t addr;

	addr = dma_map_page_attrs(t->dev, page, 0, 4096, DMA_FROM_DEVICE, attrs);
	KUNIT_EXPECT_FALSE(test, dma_mapping_error(t->dev, addr));
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_page(t->dev, addr, 4096, DMA_FROM_DEVICE);
	sg_init_table(sgl, 1);
	sg_set_page(sgl, page, 4096, 0);
	KUNIT_EXPECT_EQ(test, dma_map_sg_attrs(t->dev, sgl, 1, DMA_FROM_DEVICE, attrs), 1);
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, sg_dma_address(sgl)));
	dma_unmap_sg(t->dev, sgl, 1, DMA_FROM_DEVICE);
}

static void dax_memory_test(struct kunit *test)
{
	use_device_page(test, MEMORY_DEVICE_GENERIC, map_dax_page);
}

/*
 * Peer-to-peer memory does not bounce, alone or in a list with ordinary memory. The test calls only
 * the functions that dma-iommu.c calls first. The rest of dma-iommu.c needs a PCI device with such
 * memory.
 */
static void decline_peer_page(struct kunit *test, struct page *page)
{
	struct bounce_test *t = test->priv;
	u64 before = dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_MEMORY);
	struct scatterlist sgl[2];
	dma_addr_t addr;

	KUNIT_EXPECT_TRUE(test, is_pci_p2pdma_page(page));
	KUNIT_EXPECT_FALSE(test, dma_bounce_map_page(t->dev, page_to_phys(page), 4096,
						     DMA_FROM_DEVICE, 0, &addr));
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_MEMORY), before + 1);
	sg_init_table(sgl, 2);
	sg_set_buf(&sgl[0], t->area, 1024);
	sg_set_page(&sgl[1], page, 1024, 0);
	KUNIT_EXPECT_EQ(test, dma_bounce_map_sg(t->dev, sgl, 2, DMA_FROM_DEVICE, 0), 0);
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_MEMORY), before + 2);
	/* Without the peer-to-peer page, the list bounces. */
	sg_set_buf(&sgl[1], t->area + 8192, 1024);
	KUNIT_EXPECT_EQ(test, dma_bounce_map_sg(t->dev, sgl, 2, DMA_FROM_DEVICE, 0), 1);
	KUNIT_EXPECT_TRUE(test, dma_bounce_unmap_sg(t->dev, sgl, 2, 0));
}

static void peer_memory_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	if (!IS_ENABLED(CONFIG_PCI_P2PDMA))
		kunit_skip(test, "this kernel has no peer-to-peer memory");
	bounce_kunit_fill(t);
	use_device_page(test, MEMORY_DEVICE_PCI_P2PDMA, decline_peer_page);
	bounce_kunit_expect_area(test);
}
#else
static void dax_memory_test(struct kunit *test)
{
	kunit_skip(test, "this kernel has no device memory with pages");
}

static void peer_memory_test(struct kunit *test)
{
	kunit_skip(test, "this kernel has no device memory with pages");
}
#endif /* CONFIG_ZONE_DEVICE */

static struct kunit_case bounce_place_cases[] = {
	KUNIT_CASE(node_test),
	KUNIT_CASE(shrink_test),
	KUNIT_CASE(dax_memory_test),
	KUNIT_CASE(peer_memory_test),
	{ }
};

static struct kunit_suite bounce_place_suite = {
	.name		= "dma-bounce-place",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_place_cases,
};

kunit_test_suite(bounce_place_suite);
