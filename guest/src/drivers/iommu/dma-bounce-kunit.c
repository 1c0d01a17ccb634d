// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: the DMA API with a software device
 *
 * Each test maps memory as a driver does, acts as the device, and checks all bytes afterwards, also
 * the bytes that must not change. Tests of lists are in dma-bounce-kunit-list.c, tests of pools in
 * dma-bounce-kunit-pool.c.
 */

#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-device.h"
#include "dma-bounce-kunit.h"

/**
 * bounce_kunit_init - make the IOMMU, its device and memory for a test
 * @test: the test, which gets a &struct bounce_test
 *
 * Return: 0. On failure, the function aborts the test and does not return.
 */
int bounce_kunit_init(struct kunit *test)
{
	struct bounce_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, t);
	t->fake = fake_iommu_create();
	KUNIT_ASSERT_NOT_NULL(test, t->fake);
	test->priv = t;
	t->dev = t->fake->dev;
	t->pool = t->fake->domain.bounce;
	t->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_ON;
	t->area = (u8 *)__get_free_pages(GFP_KERNEL, get_order(AREA));
	t->expect = kunit_kmalloc(test, AREA, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, t->area);
	KUNIT_ASSERT_NOT_NULL(test, t->expect);
	return 0;
}

/**
 * bounce_kunit_exit - free what bounce_kunit_init() made
 * @test: the test
 */
void bounce_kunit_exit(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	if (!t)
		return;
	fake_iommu_destroy(t->fake);
	free_pages((unsigned long)t->area, get_order(AREA));
}

/**
 * bounce_kunit_fill - fill the test's memory, with a different pattern each time
 * @t: state of the test
 */
void bounce_kunit_fill(struct bounce_test *t)
{
	unsigned int i;

	t->seed += 101;
	for (i = 0; i < AREA; i++)
		t->area[i] = t->seed + i * 3 + (i >> 8);
	memcpy(t->expect, t->area, AREA);
}

/**
 * bounce_kunit_expect_area - compare all of the test's memory with its expected contents
 * @test: the test
 */
void bounce_kunit_expect_area(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	KUNIT_EXPECT_MEMEQ(test, t->area, t->expect, AREA);
}

/**
 * bounce_kunit_map - map part of the test's memory
 * @test: the test
 * @offset: start of the part
 * @len: length of the part in bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device.
 */
dma_addr_t bounce_kunit_map(struct kunit *test, unsigned int offset, size_t len,
			    enum dma_data_direction dir, unsigned long attrs)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr = dma_map_single_attrs(t->dev, t->area + offset, len, dir, attrs);

	KUNIT_ASSERT_FALSE(test, dma_mapping_error(t->dev, addr));
	return addr;
}

/**
 * bounce_kunit_warm - repeat a mapping until it bounces
 * @test: the test
 * @len: length of the mapping in bytes
 * @dir: direction of the transfer
 *
 * The first mappings make the pool ready, and add the first chunk of their size.
 */
void bounce_kunit_warm(struct kunit *test, size_t len, enum dma_data_direction dir)
{
	struct bounce_test *t = test->priv;
	unsigned int i;
	dma_addr_t addr;
	bool bounced;

	for (i = 0; i < 100; i++) {
		addr = bounce_kunit_map(test, 0, len, dir, 0);
		bounced = dma_bounce_owns(t->pool, addr);
		dma_unmap_single_attrs(t->dev, addr, len, dir, DMA_ATTR_SKIP_CPU_SYNC);
		if (bounced)
			return;
		msleep(20);
	}
	KUNIT_FAIL_AND_ABORT(test, "%zu bytes do not get bounced", len);
}

/**
 * bounce_kunit_map_bounced - make a mapping that bounces
 * @test: the test
 * @offset: start of the mapped part of the test's memory
 * @len: length of the part in bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device.
 */
dma_addr_t bounce_kunit_map_bounced(struct kunit *test, unsigned int offset, size_t len,
				    enum dma_data_direction dir, unsigned long attrs)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	bounce_kunit_warm(test, len, dir);
	addr = bounce_kunit_map(test, offset, len, dir, attrs);
	KUNIT_ASSERT_TRUE(test, dma_bounce_owns(t->pool, addr));
	return addr;
}

/* Bytes that the device sees, and bytes that are copied back */

static void to_device_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *seen = kunit_kmalloc(test, 1000, GFP_KERNEL);
	dma_addr_t addr;

	bounce_kunit_fill(t);
	addr = bounce_kunit_map_bounced(test, 123, 1000, DMA_TO_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr, seen, 1000));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 123, 1000);
	KUNIT_EXPECT_FALSE(test, fake_device_write(t->fake, addr, "x", 1));
	dma_unmap_single(t->dev, addr, 1000, DMA_TO_DEVICE);
	bounce_kunit_expect_area(test);
}

/* Unmapping keeps bytes that the device did not write, and copies no earlier user's data. */
static void partial_write_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 *secret = kunit_kmalloc(test, 3000, GFP_KERNEL), seen;
	dma_addr_t addr;

	KUNIT_ASSERT_NOT_NULL(test, secret);
	bounce_kunit_fill(t);
	memset(secret, SECRET, 3000);
	addr = bounce_kunit_map_bounced(test, 8192, 3000, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, secret, 3000));
	memset(t->expect + 8192, SECRET, 3000);
	dma_unmap_single(t->dev, addr, 3000, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);

	bounce_kunit_fill(t);
	addr = bounce_kunit_map(test, 200, 3000, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 500, secret, 100));
	/* The device must not see the data of the earlier mapping. */
	KUNIT_EXPECT_FALSE(test, fake_device_read(t->fake, addr, &seen, 1));
	bounce_kunit_expect_area(test);
	memset(t->expect + 700, SECRET, 100);
	dma_unmap_single(t->dev, addr, 3000, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
}

/* Without a copy at map, bytes are copied back only if unmap says that all were written. */
static void no_copy_in_test(struct kunit *test)
{
	const unsigned long attrs = DMA_ATTR_BOUNCE_NO_COPY_IN;
	struct bounce_test *t = test->priv;
	u8 *bytes = kunit_kmalloc(test, 2048, GFP_KERNEL), seen[256];
	dma_addr_t addr;

	KUNIT_ASSERT_NOT_NULL(test, bytes);
	bounce_kunit_fill(t);
	memset(bytes, SECRET, 2048);
	addr = bounce_kunit_map_bounced(test, 0, 2048, DMA_FROM_DEVICE, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 64));
	dma_unmap_single(t->dev, addr, 2048, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);

	addr = bounce_kunit_map(test, 4096, 2048, DMA_FROM_DEVICE, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 2048));
	memset(t->expect + 4096, SECRET, 2048);
	dma_unmap_single_attrs(t->dev, addr, 2048, DMA_FROM_DEVICE, DMA_ATTR_BOUNCE_ALL_WRITTEN);
	bounce_kunit_expect_area(test);

	/* Such a mapping is never synchronised, so there is no sync call that replaces the copy. */
	addr = bounce_kunit_map(test, 8192, 2048, DMA_FROM_DEVICE, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 2048));
	memset(t->expect + 8192, SECRET, 2048);
	dma_unmap_single_attrs(t->dev, addr, 2048, DMA_FROM_DEVICE,
			       DMA_ATTR_BOUNCE_ALL_WRITTEN | DMA_ATTR_SKIP_CPU_SYNC);
	bounce_kunit_expect_area(test);

	/* The attribute has no effect if the device may read. */
	addr = bounce_kunit_map_bounced(test, 300, 256, DMA_BIDIRECTIONAL, attrs);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr, seen, 256));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 300, 256);
	dma_unmap_single(t->dev, addr, 256, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
}

static void sync_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 bytes[128], seen[64];
	dma_addr_t addr;

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = bounce_kunit_map_bounced(test, 1000, 2000, DMA_BIDIRECTIONAL, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 64, bytes, 128));
	dma_sync_single_range_for_cpu(t->dev, addr, 64, 64, DMA_BIDIRECTIONAL);
	memset(t->expect + 1064, SECRET, 64);
	bounce_kunit_expect_area(test);
	dma_sync_single_for_cpu(t->dev, addr + 128, 64, DMA_BIDIRECTIONAL);
	memset(t->expect + 1128, SECRET, 64);
	bounce_kunit_expect_area(test);

	/* The CPU changes two places, and synchronises one of them for the device. */
	memset(t->area + 1500, 0x11, 32);
	memset(t->area + 1600, 0x22, 32);
	dma_sync_single_range_for_device(t->dev, addr, 500, 32, DMA_BIDIRECTIONAL);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 500, seen, 32));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 1500, 32);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 600, seen, 32));
	KUNIT_EXPECT_MEMEQ(test, seen, t->expect + 1600, 32);
	dma_unmap_single(t->dev, addr, 2000, DMA_BIDIRECTIONAL);
	memset(t->expect + 1500, 0x11, 32);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_SYNCS), 3);
}

/* The direction of a sync call decides what is copied, whatever the direction of the mapping. */
static void sync_direction_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 bytes[32], seen[16];
	dma_addr_t addr;

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = bounce_kunit_map_bounced(test, 1000, 512, DMA_BIDIRECTIONAL, 0);
	/*
	 * A polling driver syncs for the CPU, finds nothing, and syncs for the device. Meanwhile
	 * the device writes.
	 */
	dma_sync_single_for_cpu(t->dev, addr, 512, DMA_FROM_DEVICE);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 16, bytes, sizeof(bytes)));
	dma_sync_single_for_device(t->dev, addr, 512, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
	dma_sync_single_for_cpu(t->dev, addr, 512, DMA_FROM_DEVICE);
	memset(t->expect + 1016, SECRET, sizeof(bytes));
	bounce_kunit_expect_area(test);

	/* A sync call for the device's reads does not undo the CPU's writes. */
	memset(t->area + 1100, 0x11, 16);
	memset(t->expect + 1100, 0x11, 16);
	dma_sync_single_for_cpu(t->dev, addr, 512, DMA_TO_DEVICE);
	bounce_kunit_expect_area(test);
	dma_sync_single_for_device(t->dev, addr, 512, DMA_TO_DEVICE);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 100, seen, 16));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 1100, 16);
	dma_unmap_single(t->dev, addr, 512, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
}

/* A coherent device elides sync calls until its first bounced mapping. */
static void sync_elision_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	t->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_OFF;
	addr = bounce_kunit_map(test, 0, 512, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, dev_dma_skip_sync(t->dev));
	dma_unmap_single(t->dev, addr, 512, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_ELISION_LOST), 0);

	t->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_ON;
	addr = bounce_kunit_map_bounced(test, 0, 512, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dev_dma_skip_sync(t->dev));
	dma_unmap_single(t->dev, addr, 512, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_ELISION_LOST), 1);
}

/* dma_need_sync() decides by the address of the mapping. */
static void need_sync_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t plain, bounced;

	plain = bounce_kunit_map(test, SZ_8K, 512, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	KUNIT_EXPECT_FALSE(test, dma_need_sync(t->dev, plain));
	bounced = bounce_kunit_map_bounced(test, 0, 512, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dev_dma_skip_sync(t->dev));
	KUNIT_EXPECT_TRUE(test, dma_need_sync(t->dev, bounced));
	KUNIT_EXPECT_TRUE(test, dma_need_sync(t->dev, bounced + 511));
	KUNIT_EXPECT_FALSE(test, dma_need_sync(t->dev, plain));

	/* Untrusted devices may have buffers for one mapping, at any address. */
	t->dev->iommu->bounce.untrusted = true;
	KUNIT_EXPECT_TRUE(test, dma_need_sync(t->dev, plain));
	t->dev->iommu->bounce.untrusted = false;

	/* On some architectures, all devices are coherent. */
	arch_setup_dma_ops(t->dev, false);
	KUNIT_EXPECT_EQ(test, dma_need_sync(t->dev, plain), !dev_is_dma_coherent(t->dev));
	arch_setup_dma_ops(t->dev, true);

	dma_unmap_single(t->dev, bounced, 512, DMA_FROM_DEVICE);
	dma_unmap_single_attrs(t->dev, plain, 512, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
}

/*
 * An untrusted device that gets no slot gets separate pages. Sync and unmap calls find these pages
 * by the DMA address.
 */
static void untrusted_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 bytes[64];
	dma_addr_t addr;

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	t->dev->iommu->bounce.untrusted = true;
	KUNIT_ASSERT_EQ(test, dma_set_mask(t->dev, DMA_BIT_MASK(28)), 0);
	addr = bounce_kunit_map(test, 100, 512, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_SINGLE_USE), 1);
	KUNIT_EXPECT_TRUE(test, dma_need_sync(t->dev, addr));
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, 64));
	bounce_kunit_expect_area(test);
	dma_sync_single_for_cpu(t->dev, addr, 32, DMA_FROM_DEVICE);
	memset(t->expect + 100, SECRET, 32);
	bounce_kunit_expect_area(test);
	dma_unmap_single(t->dev, addr, 512, DMA_FROM_DEVICE);
	memset(t->expect + 100, SECRET, 64);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_EQ(test, dma_set_mask(t->dev, DMA_BIT_MASK(64)), 0);
	t->dev->iommu->bounce.untrusted = false;
}

/* The DMA address keeps the low bits of the buffer's address that min_align_mask selects. */
static void min_align_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;
	u8 seen[100];

	bounce_kunit_fill(t);
	dma_set_min_align_mask(t->dev, SZ_4K - 1);
	/* The slot also needs room for the offset in the page. */
	bounce_kunit_warm(test, SZ_16K, DMA_TO_DEVICE);
	addr = bounce_kunit_map(test, 4000, 5000, DMA_TO_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, addr));
	KUNIT_EXPECT_EQ(test, offset_in_page(addr), 4000);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr + 4900, seen, 100));
	KUNIT_EXPECT_MEMEQ(test, seen, t->area + 8900, 100);
	dma_unmap_single(t->dev, addr, 5000, DMA_TO_DEVICE);
	dma_set_min_align_mask(t->dev, 0);
	bounce_kunit_expect_area(test);
}

/* Mappings that do not bounce */

static void not_bounced_test(struct kunit *test)
{
	static const unsigned long attrs[] = {
		DMA_ATTR_SKIP_CPU_SYNC, DMA_ATTR_PRIVILEGED, DMA_ATTR_REQUIRE_COHERENT,
	};
	struct bounce_test *t = test->priv;
	dma_addr_t addr;
	unsigned int i;

	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	for (i = 0; i < ARRAY_SIZE(attrs); i++) {
		addr = bounce_kunit_map(test, 0, 4096, DMA_FROM_DEVICE, attrs[i]);
		KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
		dma_unmap_single_attrs(t->dev, addr, 4096, DMA_FROM_DEVICE, attrs[i]);
	}
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_ATTRS),
			ARRAY_SIZE(attrs));

	/* Registers of a device cannot be copied like memory. */
	addr = dma_map_resource(t->dev, 0xfe000000, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_ASSERT_FALSE(test, dma_mapping_error(t->dev, addr));
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_resource(t->dev, addr, 4096, DMA_FROM_DEVICE, 0);

	t->dev->iommu->bounce.threshold.write = 2048;
	addr = bounce_kunit_map(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	t->dev->iommu->bounce.threshold.write = 0;
	t->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_AUTO;
	addr = bounce_kunit_map(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
}

/* A device with a deferred attach does not bounce. */
static void attach_deferred_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct scatterlist sgl[1];
	dma_addr_t addr;

	bounce_kunit_warm(test, 2000, DMA_FROM_DEVICE);
	sg_init_one(sgl, t->area, 2000);
	t->dev->iommu->attach_deferred = 1;
	addr = bounce_kunit_map(test, 0, 2000, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_single(t->dev, addr, 2000, DMA_FROM_DEVICE);
	KUNIT_ASSERT_GT(test, dma_map_sg(t->dev, sgl, 1, DMA_FROM_DEVICE), 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, sg_dma_address(sgl)));
	dma_unmap_sg(t->dev, sgl, 1, DMA_FROM_DEVICE);
	t->dev->iommu->attach_deferred = 0;
	addr = bounce_kunit_map(test, 0, 2000, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, addr));
	dma_unmap_single(t->dev, addr, 2000, DMA_FROM_DEVICE);
}

/* A device that cannot address the whole pool does not bounce, whatever bits its mask has. */
static void odd_mask_test(struct kunit *test)
{
	static const struct { u64 mask; bool bounces; } cases[] = {
		{ DMA_BIT_MASK(28), false },
		{ FAKE_WINDOW_IOVA + FAKE_WINDOW_LEN - 2, false },
		{ FAKE_WINDOW_IOVA + FAKE_WINDOW_LEN - 1, true },
		{ DMA_BIT_MASK(32), true },
	};
	struct bounce_test *t = test->priv;
	unsigned int i, refused = 0;
	dma_addr_t addr;
	u8 byte = SECRET;

	bounce_kunit_fill(t);
	bounce_kunit_warm(test, 100, DMA_FROM_DEVICE);
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		KUNIT_ASSERT_EQ(test, dma_set_mask(t->dev, cases[i].mask), 0);
		addr = bounce_kunit_map(test, 500, 100, DMA_FROM_DEVICE, 0);
		KUNIT_EXPECT_EQ(test, dma_bounce_owns(t->pool, addr), cases[i].bounces);
		KUNIT_EXPECT_LE(test, addr + 99, cases[i].mask);
		refused += !cases[i].bounces;
		KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + i, &byte, 1));
		t->expect[500 + i] = byte;
		dma_unmap_single(t->dev, addr, 100, DMA_FROM_DEVICE);
		bounce_kunit_expect_area(test);
	}
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_MASK), refused);
	KUNIT_ASSERT_EQ(test, dma_set_mask(t->dev, DMA_BIT_MASK(64)), 0);
}

/*
 * A malicious device reads and writes all pages that the IOMMU allows, inside and outside the
 * pool's range.
 */
static void attack_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	unsigned long pfn, readable = 0, writable = 0;
	dma_addr_t in, out;
	void *entry, *page;

	/* The bytes around the mapped bytes are secret. */
	memset(t->area, SECRET, AREA);
	memset(t->area + 100, 1, 50);
	memset(t->area + 20000, 2, 60);
	bounce_kunit_warm(test, 60, DMA_FROM_DEVICE);
	/* Warming up maps the first bytes for the device, so these bytes must not be secret. */
	memset(t->area, 1, 60);
	out = bounce_kunit_map_bounced(test, 100, 50, DMA_TO_DEVICE, 0);
	in = bounce_kunit_map(test, 20000, 60, DMA_FROM_DEVICE, 0);
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
	bounce_kunit_expect_area(test);
	dma_unmap_single(t->dev, out, 50, DMA_TO_DEVICE);
	bounce_kunit_expect_area(test);
	dma_unmap_single(t->dev, in, 60, DMA_FROM_DEVICE);
	memset(t->expect + 20000, 0xff, 60);
	bounce_kunit_expect_area(test);
	/* The bytes that the device wrote do not appear in a later mapping. */
	in = bounce_kunit_map(test, 30000, 60, DMA_FROM_DEVICE, 0);
	dma_unmap_single(t->dev, in, 60, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
}

static void no_release(struct device *dev)
{
}

/* The opt-in ends when the driver is unbound. */
static void opt_in_test(struct kunit *test)
{
	struct dev_iommu *iommu = kunit_kzalloc(test, sizeof(*iommu), GFP_KERNEL);
	struct pci_dev *pdev = kunit_kzalloc(test, sizeof(*pdev), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, iommu);
	KUNIT_ASSERT_NOT_NULL(test, pdev);
	device_initialize(&pdev->dev);
	pdev->dev.bus = &pci_bus_type;
	pdev->dev.release = no_release;
	pdev->dev.iommu = iommu;
	dma_bounce_opt_in(&pdev->dev);
	KUNIT_EXPECT_TRUE(test, iommu->bounce.opt_in);
	put_device(&pdev->dev);
	KUNIT_EXPECT_FALSE(test, iommu->bounce.opt_in);
}

static struct kunit_case bounce_cases[] = {
	KUNIT_CASE(to_device_test),
	KUNIT_CASE(partial_write_test),
	KUNIT_CASE(no_copy_in_test),
	KUNIT_CASE(sync_test),
	KUNIT_CASE(sync_direction_test),
	KUNIT_CASE(sync_elision_test),
	KUNIT_CASE(need_sync_test),
	KUNIT_CASE(untrusted_test),
	KUNIT_CASE(min_align_test),
	KUNIT_CASE(not_bounced_test),
	KUNIT_CASE(attach_deferred_test),
	KUNIT_CASE(odd_mask_test),
	KUNIT_CASE(opt_in_test),
	KUNIT_CASE(attack_test),
	{ }
};

static struct kunit_suite bounce_suite = {
	.name		= "dma-bounce",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_cases,
};

kunit_test_suite(bounce_suite);
