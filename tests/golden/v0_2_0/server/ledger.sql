BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0200');
CREATE TABLE certificates (
	fingerprint VARCHAR(64) NOT NULL,
	party VARCHAR(16) NOT NULL,
	name VARCHAR(64) NOT NULL,
	not_before FLOAT NOT NULL,
	not_after FLOAT NOT NULL,
	added_at FLOAT NOT NULL,
	revoked_at FLOAT,
	reason VARCHAR,
	PRIMARY KEY (fingerprint)
);
CREATE TABLE rounds (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	size INTEGER NOT NULL,
	quorum INTEGER NOT NULL,
	opened_at FLOAT NOT NULL,
	closed_at FLOAT,
	state VARCHAR(64),
	complete BOOLEAN,
	abandoned VARCHAR,
	scored BOOLEAN NOT NULL,
	aggregations INTEGER DEFAULT 0 NOT NULL,
	rolled_back BOOLEAN DEFAULT 0 NOT NULL,
	statistics JSON,
	PRIMARY KEY (run, round, attempt)
);
INSERT INTO "rounds" VALUES('kept',0,1,1,1,1.79540762295161199571e+09,1.79540762508489656445e+09,'0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',1,NULL,0,1,0,'{"prototype_min_distance": 1.111111088029502, "classes_covered": 0.0}');
INSERT INTO "rounds" VALUES('kept',1,1,2,2,1.79540762509397888182e+09,1.79540762692369914059e+09,'28e76e63f9ac86910a8831a8ee337469c7df3c4368343f3d044d3e79dc4f02c7',1,NULL,1,1,0,'{"prototype_shift": 0.003495690110405669, "prototype_min_distance": 1.035446278446151, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',2,1,2,2,1.79540762695752811428e+09,1.79540762912531638145e+09,'3f80984a6529f967767781d60dc8274fccff068070ac6fa44d5273205ec12603',1,NULL,1,1,0,'{"prototype_shift": 0.0025551488014509795, "prototype_min_distance": 0.9880668058868984, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',3,1,2,2,1.79540762915483927729e+09,NULL,NULL,NULL,NULL,0,0,0,NULL);
CREATE TABLE runs (
	run VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	recipe VARCHAR NOT NULL,
	position INTEGER NOT NULL,
	began_at FLOAT NOT NULL,
	ended_at FLOAT,
	outcome VARCHAR(16),
	reason VARCHAR,
	paused BOOLEAN DEFAULT 0 NOT NULL,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('kept','73e65e83a1acc98b227540e8b101425ba7924ab459941c8eb86a5a78d9cd97d3','{"name":"kept","seed":0,"rounds":5,"classes":10,"class_names":[],"input":{"shape":[1,8,8],"mean":[0.5],"std":[0.5],"fit":"exact","colours":"exact","window":null},"method":{"name":"fednh"},"model":{"name":"mlp","hidden":[16]},"plan":{"epochs":12,"batch_size":4,"drop_last":false,"optimizer":"sgd","lr":0.01,"momentum":0.9,"weight_decay":0.0,"schedule":"constant","lr_decay":1.0,"max_grad_norm":null,"augmentation":"none","amp":true,"checkpoint":false},"federation":{"min_sites":2,"participation":1.0,"over_selection":1.0,"quorum":1.0,"deadline_s":600.0,"grace":0.5,"required_sites":[],"min_contributors":2,"stall_timeout_s":120.0,"max_attempts":5,"site_wait_timeout_s":604800.0,"max_update_norm":1000000000.0,"outlier_factor":100.0,"score_every":1,"score_personal_every":null,"score_deadline_s":600.0,"heartbeat_s":1.0},"evaluation":{"frequency_groups":false,"probabilities":false,"class_order":[]}}',1,1.79540761855833220488e+09,NULL,NULL,NULL,0);
CREATE TABLE scores (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	name VARCHAR(64) NOT NULL,
	value FLOAT NOT NULL,
	PRIMARY KEY (run, round, attempt, site, name)
);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.balanced_accuracy',6.50000000000000133226e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_l',8.72698136645050137616e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_v',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.accuracy',5.96153846153846145305e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.balanced_accuracy',5.96153846153846145305e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_l',0.898952749504063);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_v',6.60256410256410242176e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.accuracy',8.6730769230769233502e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.balanced_accuracy',8.6730769230769233502e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_l',9.64094252558425068855e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_v',0.938034188034188);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.accuracy',0.875);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.balanced_accuracy',0.875);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_l',0.947552447992872);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_v',0.875);
CREATE TABLE sites (
	site VARCHAR(64) NOT NULL,
	roles JSON NOT NULL,
	excluded VARCHAR,
	PRIMARY KEY (site)
);
INSERT INTO "sites" VALUES('site-2','["trainer"]',NULL);
INSERT INTO "sites" VALUES('site-1','["trainer"]',NULL);
CREATE TABLE tasks (
	task_id VARCHAR(64) NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	base_digest VARCHAR(64),
	base_bytes INTEGER NOT NULL,
	task_status VARCHAR(16) NOT NULL,
	reason VARCHAR NOT NULL,
	PRIMARY KEY (task_id)
);
INSERT INTO "tasks" VALUES('513fa584b23a3075ef17bc8e793f36f2','kept',0,1,'site-2','initialise',NULL,0,'reported','');
INSERT INTO "tasks" VALUES('84dd78ce98de742d043488d7e3a6d5f9','kept',1,1,'site-1','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','');
INSERT INTO "tasks" VALUES('423ac343ac34067401df24ba995889ee','kept',1,1,'site-2','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','');
INSERT INTO "tasks" VALUES('5daa6a009cdcb43fbf5a90b780995e72','kept',1,1,'site-1','score','28e76e63f9ac86910a8831a8ee337469c7df3c4368343f3d044d3e79dc4f02c7',5108,'reported','');
INSERT INTO "tasks" VALUES('32014905a855ecbdba258fa55138c04d','kept',1,1,'site-2','score','28e76e63f9ac86910a8831a8ee337469c7df3c4368343f3d044d3e79dc4f02c7',5108,'reported','');
INSERT INTO "tasks" VALUES('cd4864a53bb4fb6ddede28b4f27c5f26','kept',2,1,'site-1','fit','28e76e63f9ac86910a8831a8ee337469c7df3c4368343f3d044d3e79dc4f02c7',5108,'reported','');
INSERT INTO "tasks" VALUES('30bfb370e89d3e9c78c919ac3555badb','kept',2,1,'site-2','fit','28e76e63f9ac86910a8831a8ee337469c7df3c4368343f3d044d3e79dc4f02c7',5108,'reported','');
INSERT INTO "tasks" VALUES('a80285bf206376493b9d463a4984c468','kept',2,1,'site-1','score','3f80984a6529f967767781d60dc8274fccff068070ac6fa44d5273205ec12603',5108,'reported','');
INSERT INTO "tasks" VALUES('e02b2085fe5326ec7c8fba80ba99af02','kept',2,1,'site-2','score','3f80984a6529f967767781d60dc8274fccff068070ac6fa44d5273205ec12603',5108,'reported','');
INSERT INTO "tasks" VALUES('3222a0ea953f5f950e407b1ba4473336','kept',3,1,'site-1','fit','3f80984a6529f967767781d60dc8274fccff068070ac6fa44d5273205ec12603',5108,'started','');
INSERT INTO "tasks" VALUES('323e3e3961fc0fd1dda096944f9a224f','kept',3,1,'site-2','fit','3f80984a6529f967767781d60dc8274fccff068070ac6fa44d5273205ec12603',5108,'reported','');
CREATE TABLE updates (
	id INTEGER NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	task_id VARCHAR(64) NOT NULL,
	verdict VARCHAR(16) NOT NULL,
	code VARCHAR(24) DEFAULT '' NOT NULL,
	reason VARCHAR NOT NULL,
	digest VARCHAR(64) NOT NULL,
	bytes INTEGER NOT NULL,
	metrics JSON NOT NULL,
	weight FLOAT,
	norm FLOAT,
	set_aside VARCHAR,
	record_hash VARCHAR(64) NOT NULL,
	at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "updates" VALUES(1,'kept',0,1,'site-2','513fa584b23a3075ef17bc8e793f36f2','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'b339b0707b66fba20ba647ca04d5e5f2d6af5eba248d6d6ddb436cacb894aec0',1.79540762506267714501e+09);
INSERT INTO "updates" VALUES(2,'kept',1,1,'site-1','84dd78ce98de742d043488d7e3a6d5f9','accepted','','','7412942c9a3aca403bf1afa40ba600303bd10246d39cf2d0c51e34a55049e885',5612,'{"loss": 0.5067797165700129}',NULL,1.26036553105737674233e+01,NULL,'82acca3e588ae8b571e31183bdf1c8cdd2c9f3cf8b8874c44a5e77f1e3080d09',1.79540762662567090993e+09);
INSERT INTO "updates" VALUES(3,'kept',1,1,'site-2','423ac343ac34067401df24ba995889ee','accepted','','','66ffeac069907c073277635774c7ddd989d8ef91b925b07012be08f22e8ffb38',5740,'{"loss": 0.6291889229206123}',NULL,1.25589374918842633377e+01,NULL,'20dba123a0511b09133c194fe7bf16056a8bf994524807d6ebfde5a8ce9eee1a',1.79540762691247558595e+09);
INSERT INTO "updates" VALUES(4,'kept',2,1,'site-1','cd4864a53bb4fb6ddede28b4f27c5f26','accepted','','','87350ed4d747279b52df77926bc7fe718a0dcf9b73519da4487657a34079ba77',5612,'{"loss": 0.07087782535728154}',NULL,4.913473920799076744e+00,NULL,'b607ff33b874b07a0a3e3b481452d1547adf4eb866319e25b8f133583e9e87d0',1.79540762875769519804e+09);
INSERT INTO "updates" VALUES(5,'kept',2,1,'site-2','30bfb370e89d3e9c78c919ac3555badb','accepted','','','bc9d7768de2dc22cc261b5e68d50847131ab763c2c3766cdec43fc2d4b59793b',5740,'{"loss": 0.11339830340761127}',NULL,6.08906054894202863891e+00,NULL,'d46cb438a1b1aadef282211361db6f07ea8a5f3b7adc5b08269707bb88e24c1a',1.79540762911383724219e+09);
INSERT INTO "updates" VALUES(6,'kept',3,1,'site-2','323e3e3961fc0fd1dda096944f9a224f','accepted','','','5846c3001bc3d00907b7a08e216dc0302e2e66b37577aee0e515631ab931bdfd',5740,'{"loss": 0.052455878980232004}',NULL,4.19077137269367,NULL,'a8a43c506de94925ada3046bf04e8326d12d82f1314cbe97dff8a283bd81cac1',1.79540763068768358234e+09);
CREATE INDEX tasks_of_round ON tasks (run, round);
CREATE INDEX updates_of_round ON updates (run, round);
CREATE UNIQUE INDEX one_update_a_task ON updates (task_id) WHERE verdict = 'accepted';
COMMIT;
