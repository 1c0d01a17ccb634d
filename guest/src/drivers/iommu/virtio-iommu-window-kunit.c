// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounce windows of virtio-iommu, with a software device
 */

#include <kunit/test.h>
#include <linux/bitmap.h>
#include <linux/completion.h>
#include <linux/delay.h>
#include <linux/iommu.h>
#include <linux/sizes.h>

#include "virtio-iommu-window.h"

#define CHUNKS		4
#define CHUNK		SZ_2M
#define IOVA		0xe0000000UL

/**
 * struct window_test - the device, and the windows that the driver sees
 * @window:	the windows
 * @vdev:	virtio device for messages
 * @domain:	a domain of the device
 * @used:	bitmap for @window
 * @iova:	IOVA of the chunk at each place of the region, 0 without a chunk
 * @last:	place that was freed last, which the device reuses first
 * @slow:	the device delays its answer after it has taken a chunk back
 * @deleted:	completed when the device has taken a chunk back
 * @del_work:	gives the first chunk back
 * @ret:	result of @del_work
 * @sent:	the driver's part of the last request
 */
static struct window_test {
	struct viommu_window	window;
	struct virtio_device	vdev;
	struct iommu_domain	domain;
	unsigned long		used[1];
	u64			iova[CHUNKS];
	unsigned int		last;
	bool			slow;
	struct completion	deleted;
	struct work_struct	del_work;
	bool			ret;
	union {
		struct virtio_iommu_req_window_v2	v2;
		struct virtio_iommu_req_window_add	v3;
	} sent;
} w;

static u64 iova_of(struct virtio_iommu_req_window_add *req)
{
	struct virtio_iommu_req_window_v2 *v2 = (void *)req;

	return le64_to_cpu(w.window.v2 ? v2->iova : req->iova);
}

static int answer_add(struct virtio_iommu_req_window_add *req)
{
	unsigned int i, place;

	for (i = 0; i < CHUNKS; i++) {
		place = (w.last + i) % CHUNKS;
		if (w.iova[place])
			continue;
		w.iova[place] = iova_of(req);
		req->shm_offset = cpu_to_le64(place * (u64)CHUNK);
		return 0;
	}
	return -ENOMEM;
}

/* Both requests have the address at the same place. */
static int answer_del(struct virtio_iommu_req_window_add *req)
{
	unsigned int i;

	for (i = 0; i < CHUNKS; i++) {
		if (w.iova[i] != iova_of(req))
			continue;
		w.iova[i] = 0;
		w.last = i;
		complete(&w.deleted);
		if (w.slow)
			msleep(200);
		return 0;
	}
	return -ENOENT;
}

static int answer(struct viommu_dev *viommu, void *buf, size_t len)
{
	struct virtio_iommu_req_head *head = buf;

	memcpy(&w.sent, buf, sizeof(w.sent.v2));
	return head->type == VIRTIO_IOMMU_T_WINDOW_ADD ? answer_add(buf) : answer_del(buf);
}

static struct viommu_window *find_window(struct iommu_domain *domain, u32 *id)
{
	*id = 1;
	return &w.window;
}

static const struct viommu_window_provider provider = {
	.ops	= VIOMMU_WINDOW_OPS,
	.find	= find_window,
};

static const struct iommu_domain_ops domain_ops = {
	.bounce_ops	= &provider.ops,
};

static void del_first(struct work_struct *work)
{
	w.ret = viommu_window_del(&w.domain, IOVA, w.window.region, CHUNK);
}

static int window_init(struct kunit *test)
{
	memset(&w, 0, sizeof(w));
	device_initialize(&w.vdev.dev);
	w.domain.ops = &domain_ops;
	/* The test does not access the memory, so the address may be invalid. */
	w.window = (struct viommu_window) {
		.vdev		= &w.vdev,
		.send		= answer,
		.region		= (void *)SZ_1G,
		.region_len	= CHUNKS * (u64)CHUNK,
		.iova_start	= IOVA,
		.iova_len	= CHUNKS * (u64)CHUNK,
		.chunk_size	= CHUNK,
		.budget		= CHUNKS * (u64)CHUNK,
		.used		= w.used,
	};
	mutex_init(&w.window.lock);
	init_completion(&w.deleted);
	INIT_WORK(&w.del_work, del_first);
	return 0;
}

/* The device reuses the place of a removed chunk before the driver gets the answer. */
static void reused_place_test(struct kunit *test)
{
	size_t size = CHUNK;
	void *first, *second;

	first = viommu_window_add(&w.domain, IOVA, &size, IOMMU_READ);
	KUNIT_ASSERT_PTR_EQ(test, first, w.window.region);
	w.slow = true;
	schedule_work(&w.del_work);
	wait_for_completion(&w.deleted);
	second = viommu_window_add(&w.domain, IOVA + CHUNK, &size, IOMMU_READ);
	flush_work(&w.del_work);
	KUNIT_EXPECT_TRUE(test, w.ret);
	KUNIT_EXPECT_FALSE(test, IS_ERR(second));
	KUNIT_EXPECT_EQ(test, w.window.nused, 1);
	KUNIT_EXPECT_EQ(test, bitmap_weight(w.used, CHUNKS), 1);
}

/* Each version has its own layout of the driver's part. */
static void version_test(struct kunit *test)
{
	size_t size = CHUNK;
	void *va;

	va = viommu_window_add(&w.domain, IOVA, &size, IOMMU_WRITE);
	KUNIT_ASSERT_FALSE(test, IS_ERR(va));
	KUNIT_EXPECT_EQ(test, le64_to_cpu(w.sent.v3.iova), IOVA);
	KUNIT_EXPECT_EQ(test, le32_to_cpu(w.sent.v3.flags), VIRTIO_IOMMU_MAP_F_WRITE);
	KUNIT_EXPECT_TRUE(test, viommu_window_del(&w.domain, IOVA, va, size));
	w.window.v2 = true;
	va = viommu_window_add(&w.domain, IOVA, &size, IOMMU_WRITE);
	KUNIT_ASSERT_FALSE(test, IS_ERR(va));
	KUNIT_EXPECT_EQ(test, le64_to_cpu(w.sent.v2.iova), IOVA);
	KUNIT_EXPECT_EQ(test, le32_to_cpu(w.sent.v2.flags), VIRTIO_IOMMU_MAP_F_WRITE);
	KUNIT_EXPECT_TRUE(test, viommu_window_del(&w.domain, IOVA, va, size));
	KUNIT_EXPECT_EQ(test, le64_to_cpu(w.sent.v2.iova), IOVA);
	KUNIT_EXPECT_EQ(test, le32_to_cpu(w.sent.v2.flags), 0);
}

/* In version 2, the offered feature decides whether windows are below or above 4 GiB. */
static void side_test(struct kunit *test)
{
	KUNIT_EXPECT_TRUE(test, viommu_window_iova_fits(false, IOVA, U32_MAX));
	KUNIT_EXPECT_FALSE(test, viommu_window_iova_fits(false, IOVA, SZ_4G));
	KUNIT_EXPECT_FALSE(test, viommu_window_iova_fits(false, SZ_4G, SZ_4G + CHUNK - 1));
	KUNIT_EXPECT_TRUE(test, viommu_window_iova_fits(true, SZ_4G, SZ_4G + CHUNK - 1));
	KUNIT_EXPECT_FALSE(test, viommu_window_iova_fits(true, IOVA, SZ_4G + CHUNK - 1));
}

/* Requests for a chunk above 4 GiB contain its full address. */
static void high_test(struct kunit *test)
{
	dma_addr_t iova = 0x7fe0000000UL;
	size_t size = CHUNK;
	void *va;

	w.window.iova_start = iova;
	va = viommu_window_add(&w.domain, iova, &size, IOMMU_READ | IOMMU_WRITE);
	KUNIT_ASSERT_FALSE(test, IS_ERR(va));
	KUNIT_EXPECT_EQ(test, w.iova[0], iova);
	KUNIT_EXPECT_TRUE(test, viommu_window_del(&w.domain, iova, va, size));
	KUNIT_EXPECT_EQ(test, w.iova[0], 0);
}

/* The domain gets the thresholds that the device advises, one for each direction. */
static void advice_test(struct kunit *test)
{
	struct dma_bounce_limits limits = {};

	static_assert(offsetof(struct virtio_iommu_window_config, bounce_threshold) == 72);
	static_assert(offsetof(struct virtio_iommu_window_config, bounce_threshold_write) == 76);
	static_assert(sizeof(struct virtio_iommu_window_config) == 80);
	w.window.threshold = (struct dma_bounce_thresholds) { .read = SZ_64K, .write = SZ_16K };
	KUNIT_ASSERT_EQ(test, viommu_window_limits(&w.domain, &limits), 0);
	KUNIT_EXPECT_EQ(test, limits.threshold.read, SZ_64K);
	KUNIT_EXPECT_EQ(test, limits.threshold.write, SZ_16K);
}

static struct kunit_case window_cases[] = {
	KUNIT_CASE(reused_place_test),
	KUNIT_CASE(version_test),
	KUNIT_CASE(side_test),
	KUNIT_CASE(high_test),
	KUNIT_CASE(advice_test),
	{ }
};

static struct kunit_suite window_suite = {
	.name		= "dma-bounce-window",
	.init		= window_init,
	.test_cases	= window_cases,
};

kunit_test_suite(window_suite);
